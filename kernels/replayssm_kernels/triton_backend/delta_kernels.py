"""Device code of the delta rule (GDN: one decay a head; KDA: one a channel of d_k).

A window is read in pieces of up to 16 tokens, as in `plain_kernels`, and solved as in `torch_backend.delta`:

    prepare   all pieces at once, without the state: T = (1 + β M)⁻¹ β and A T, where M_ij and A_ij are the keys and
              queries of token i against the decayed keys of tokens j < i and j <= i
    window    e = v - S k̃;   o_i = S_read q̃_i + Σ_j (A T)_ij e_j;   u = T e;   fold = exp(G_L) S + Σ_j u_j k̂_jᵀ

k̃ and q̃ are decayed from the start of the piece, k̂ to its end. GDN applies these decays as numbers per token. KDA
reads the decayed keys and queries from `prepare`. Answers take e from the read copy, the fold from the recurrence copy.
"""

import triton
import triton.language as tl

from .state_tiles import (
    COLUMNS,
    FIRST,
    STOP,
    banded,
    load_copies,
    piece_row,
    piece_slice,
    plan_copies,
    product,
    read_slice,
    readout,
    recurrence_slice,
    state_offsets,
    store_readout,
    store_slice,
    store_state,
)


@triton.jit(do_not_specialize=["tokens"])
def delta_prepare_kernel(
    q_ptr, k_ptr, beta_ptr, decay_ptr, solve_ptr, mix_ptr,
    from_start_ptr, to_end_ptr, start_q_ptr, start_k_ptr, end_k_ptr, gate_ptr,
    row_ptr, piece_ptr, q_row, q_token, k_row, k_token, tokens, heads, groups,
    d_k: tl.constexpr, D_K: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    CHANNELS: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (pieces, members, groups). solve = T and mix = A T `[members, P, H, L (i), L (j)]`.

    Per head: decay is log α `[R, T, H]`; from_start and to_end `[members, P, H, L]` are the decays of k̃ and k̂.
    CHANNELS: decay is α `[R, T, H, d_k]`; start_q, start_k and end_k `[members, H, P, L, d_k]` are q̃, k̃ and k̂. Rows
    past a piece's end are not written. In gate `[members, H, P, 2, d_k]` the first row counts.
    One warp: all exchanges are within it.
    """
    piece, member, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(row_ptr + member).to(tl.int64)
    first = tl.load(piece_ptr + COLUMNS * piece + FIRST)
    stop = tl.load(piece_ptr + COLUMNS * piece + STOP)
    t = tl.arange(0, L)
    live = first + t < stop
    token = (first + t).to(tl.int64)
    square = t[:, None] * L + t[None, :]
    q_ptr += row * q_row + group * d_k
    k_ptr += row * k_row + group * d_k
    share = heads // groups
    if not CHANNELS:
        of_keys, of_queries = tl.zeros((L, L), dtype=tl.float32), tl.zeros((L, L), dtype=tl.float32)
        for s in tl.static_range(D_K // N):
            q = piece_slice(q_ptr, q_token, first, stop, s, d_k, N, L).to(tl.float32)
            k = piece_slice(k_ptr, k_token, first, stop, s, d_k, N, L).to(tl.float32)
            of_keys += product(k, tl.trans(k), EXACT, EXACT, PRECISION)
            of_queries += product(q, tl.trans(k), EXACT, EXACT, PRECISION)
    for head in range(group * share, (group + 1) * share):
        at_head = (row * tokens + token) * heads + head
        beta = tl.load(beta_ptr + at_head, mask=live, other=0.0)
        at = ((member * tl.num_programs(0) + piece).to(tl.int64) * heads + head) * L
        if CHANNELS:
            of_head = ((member * heads + head).to(tl.int64) * tl.num_programs(0) + piece) * d_k
            overlap, attention = _decay_channels(
                q_ptr, q_token, k_ptr, k_token,
                decay_ptr + (row * tokens * heads + head) * d_k, heads * d_k, first, stop,
                solve_ptr + at * L, mix_ptr + at * L,
                start_q_ptr + of_head * L, start_k_ptr + of_head * L, end_k_ptr + of_head * L,
                gate_ptr + 2 * of_head, d_k, D_K, N, L, PRECISION,
            )  # fmt: skip
        else:
            g = tl.cumsum(tl.load(decay_ptr + at_head, mask=live, other=0.0), axis=0)
            last = tl.sum(tl.where(t == L - 1, g, 0.0), axis=0)
            between = tl.exp(tl.where(t[:, None] >= t[None, :], g[:, None] - g[None, :], float("-inf")))
            overlap, attention = of_keys * between, of_queries * between
            tl.store(from_start_ptr + at + t, tl.exp(g))
            tl.store(to_end_ptr + at + t, tl.exp(last - g))
        solve = _inverse(tl.where(t[:, None] > t[None, :], beta[:, None] * overlap, 0.0), L) * beta[None, :]
        tl.store(solve_ptr + at * L + square, solve)
        tl.store(mix_ptr + at * L + square, product(attention, solve, False, False, PRECISION))


@triton.jit
def _decay_channels(
    q_ptr, q_token, k_ptr, k_token, decay_ptr, decay_token, first, stop,
    overlap_ptr, attention_ptr, start_q_ptr, start_k_ptr, end_k_ptr, gate_ptr,
    d_k: tl.constexpr, D_K: tl.constexpr, N: tl.constexpr, L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(overlap, attention) `[L (i), L (j)]`. Products of decays, not quotients, which could overflow.

    In both halves of the piece, token after token: every key decays on, and meets the token's key and query. Then the
    second half's keys and queries, decayed from its start, meet the first half's keys, decayed to its end.
    """
    HALF: tl.constexpr = L // 2
    j, half, h = tl.arange(0, D_K), tl.arange(0, 2)[:, None], tl.arange(0, HALF)
    gate = tl.zeros((2, D_K), dtype=tl.float32) + 1.0
    decayed = tl.zeros((2, HALF, D_K), dtype=tl.float32)
    for i in range(HALF):
        t = half * HALF + i
        there = (first + t < stop) & (j < d_k)[None, :]
        token = (first + t).to(tl.int64)
        alpha = tl.load(decay_ptr + token * decay_token + j[None, :], mask=there, other=1.0)
        q = tl.load(q_ptr + token * q_token + j[None, :], mask=there, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + token * k_token + j[None, :], mask=there, other=0.0).to(tl.float32)
        gate *= alpha
        decayed = tl.where((h == i)[None, :, None], k[:, None, :], decayed * alpha[:, None, :])
        at = t * L + half * HALF + h[None, :]
        tl.store(overlap_ptr + at, tl.sum(decayed * k[:, None, :], axis=2))
        tl.store(attention_ptr + at, tl.sum(decayed * q[:, None, :], axis=2))
        tl.store(start_q_ptr + t * d_k + j[None, :], gate * q, mask=there)
        tl.store(start_k_ptr + t * d_k + j[None, :], gate * k, mask=there)
    t, width = tl.arange(0, L), tl.arange(0, N)
    tl.store(
        end_k_ptr + t[:, None] * d_k + j[None, :],
        tl.reshape(decayed, (L, D_K)),
        mask=(first + t < stop)[:, None] & (j < d_k)[None, :],
    )
    tl.store(gate_ptr + half * d_k + j[None, :], gate, mask=(j < d_k)[None, :])
    tl.debug_barrier()  # what one thread stored another reads
    second = (t >= HALF)[:, None]
    of_keys, of_queries = tl.zeros((L, L), dtype=tl.float32), tl.zeros((L, L), dtype=tl.float32)
    for s in tl.static_range(D_K // N):
        inside = s * N + width < d_k
        there = (first + t < stop)[:, None] & inside[None, :]
        at = t[:, None] * d_k + s * N + width[None, :]
        q = tl.load(start_q_ptr + at, mask=there & second, other=0.0)
        k = tl.load(start_k_ptr + at, mask=there & second, other=0.0)
        end = tl.load(end_k_ptr + at, mask=there & (t < HALF)[:, None], other=0.0)
        gate_1 = tl.load(gate_ptr + s * N + width, mask=inside, other=0.0)
        gate_2 = tl.load(gate_ptr + d_k + s * N + width, mask=inside, other=0.0)
        of_keys += product(k, tl.trans(end), False, False, PRECISION)
        of_queries += product(q, tl.trans(end), False, False, PRECISION)
        tl.store(start_q_ptr + at, q * gate_1[None, :], mask=there & second)
        tl.store(start_k_ptr + at, k * gate_1[None, :], mask=there & second)
        tl.store(end_k_ptr + at, end * gate_2[None, :], mask=there & (t < HALF)[:, None])
        tl.store(gate_ptr + s * N + width, gate_1 * gate_2, mask=inside)
    square, across = t[:, None] * L + t[None, :], second & (t < HALF)[None, :]
    stored = second == (t >= HALF)[None, :]  # nothing of the other half, and the first half has nothing of the second
    overlap = tl.where(across, of_keys, tl.load(overlap_ptr + square, mask=stored, other=0.0))
    attention = tl.where(across, of_queries, tl.load(attention_ptr + square, mask=stored, other=0.0))
    tl.debug_barrier()
    return overlap, tl.where(t[:, None] >= t[None, :], attention, 0.0)


@triton.jit
def _inverse(n, L: tl.constexpr):
    """(1 + n)⁻¹ of a strictly lower triangular n `[L, L]` by substitution.

    Powers of n, (1 - n)(1 + n²)(1 + n⁴)(1 + n⁸), grow into the thousands where keys repeat, before they cancel.
    """
    t = tl.arange(0, L)
    x = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    for j in range(L - 1):
        column = tl.sum(tl.where((t == j)[None, :], n, 0.0), axis=1)
        row = tl.sum(tl.where((t == j)[:, None], x, 0.0), axis=0)
        x -= column[:, None] * row[None, :]
    return x


@triton.jit(do_not_specialize=["pieces", "tokens", "layer"])
def delta_window_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, solve_ptr, mix_ptr,
    from_start_ptr, to_end_ptr, start_q_ptr, start_k_ptr, end_k_ptr, gate_ptr,
    recurrence_ptr, read_ptr, fold_ptr, row_ptr, place_ptr, seed_ptr, document_ptr, padding_ptr, piece_ptr, pieces,
    q_row, q_token, k_row, k_token, v_row, v_token, tokens, layer, heads, groups,
    d_v: tl.constexpr, d_k: tl.constexpr, D_V: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr, L: tl.constexpr,
    RECURRENCE_CAST: tl.constexpr, READ_CAST: tl.constexpr, SHARED: tl.constexpr, CHAINED: tl.constexpr,
    READS_FOLD: tl.constexpr,
    STORED: tl.constexpr, CHANNELS: tl.constexpr, LONG: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (heads, members, parts of d_v); tables, tiles and bands as in `plain_kernels.window_kernel`.

    STORED: the fold takes the u that the answers were made with, but for the window's last token. Since T is lower
    triangular, that is T times errors of the read copy, of which the last is the recurrence copy's.

    A piece needs only the products of a copy with its keys and queries. They are formed as soon as the copy is. So one
    state, not two, is alive from one piece to the next, except in LONG windows of separate copies.
    """
    head, member, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(row_ptr + member).to(tl.int64)
    place = tl.load(place_ptr + member).to(tl.int64)
    group = head // (heads // groups)
    seed = tl.load(seed_ptr + member)
    document, padding = tl.load(document_ptr + member), tl.load(padding_ptr + member)
    key = (layer << 17) | (head << 1)
    i, j, t = part * D_V + tl.arange(0, D_V), tl.arange(0, N), tl.arange(0, L)
    in_v = i < d_v
    state = state_offsets(0, place, heads, head, i, d_v, d_k, N)
    q_ptr += row * q_row + group * d_k
    k_ptr += row * k_row + group * d_k
    v_ptr += row * v_row + head * d_v
    o_ptr += (row * tokens * heads + head) * d_v
    if CHANNELS:
        of_head = (member * heads + head).to(tl.int64) * pieces * d_k
        start_q_ptr += of_head * L
        start_k_ptr += of_head * L
        end_k_ptr += of_head * L
        gate_ptr += 2 * of_head

    recurrence, read = load_copies(recurrence_ptr, read_ptr, state, in_v, d_k, N, SLICES)
    first, stop, kind, position, slot, origin = piece_row(piece_ptr, 0, pieces)
    BANDS: tl.constexpr = D_V // 16
    column = part * D_V + tl.arange(0, BANDS)[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    # Of the read copy with queries and keys, and of the recurrence copy with keys, where that is another.
    queried = tl.zeros((BANDS, L, 16), dtype=tl.float32)
    predicted, recurred = queried, queried
    for s in tl.static_range(SLICES):
        q = _decayed_slice(q_ptr, q_token, start_q_ptr, first, stop, 0, s, d_k, N, L, CHANNELS)
        k = _decayed_slice(k_ptr, k_token, start_k_ptr, first, stop, 0, s, d_k, N, L, CHANNELS)
        queried += readout(q, read[s], EXACT, PRECISION)
        predicted += readout(k, read[s], EXACT, PRECISION)
        if not SHARED:
            recurred += readout(k, recurrence[s], EXACT, PRECISION)
    for p in range(pieces):
        first_next, stop_next, kind_next, position_next, slot_next, origin_next = piece_row(piece_ptr, p + 1, pieces)
        live = first + t < stop
        token = (first + t).to(tl.int64)
        at = ((member * pieces + p).to(tl.int64) * heads + head) * L
        in_piece = live[None, :, None] & (column < d_v)
        v = tl.load(v_ptr + token[None, :, None] * v_token + column, mask=in_piece, other=0.0).to(tl.float32)
        mix = tl.load(mix_ptr + at * L + t[:, None] * L + t[None, :])
        solve = tl.load(solve_ptr + at * L + t[:, None] * L + t[None, :])
        end_k, next_q, next_k, gates = (), (), (), ()
        for s in tl.static_range(SLICES):
            k = _decayed_slice(k_ptr, k_token, end_k_ptr, first, stop, p, s, d_k, N, L, CHANNELS).to(tl.float32)
            if CHANNELS:
                gates += (tl.load(gate_ptr + 2 * p * d_k + s * N + j, mask=s * N + j < d_k, other=0.0)[None, :],)
            else:
                gates += (tl.load(from_start_ptr + at + L - 1),)
                k *= tl.load(to_end_ptr + at + t)[:, None]
            end_k += (k,)
            next_q += (
                _decayed_slice(q_ptr, q_token, start_q_ptr, first_next, stop_next, p + 1, s, d_k, N, L, CHANNELS),
            )
            next_k += (
                _decayed_slice(k_ptr, k_token, start_k_ptr, first_next, stop_next, p + 1, s, d_k, N, L, CHANNELS),
            )
        if not CHANNELS:
            from_start = tl.load(from_start_ptr + at + t)[None, :, None]
            queried *= from_start
            predicted *= from_start
            recurred *= from_start
        error = v - predicted
        o = queried + product(banded(mix, BANDS), error, False, False, PRECISION)
        tl.store(o_ptr + token[None, :, None] * (heads * d_v) + column, o, mask=in_piece)
        if LONG and not SHARED and not STORED:
            read_values = _values(solve, error, PRECISION)  # the read copy runs on with its own
        if not SHARED:
            if STORED:
                error = tl.where((kind > 0) & (first + t == stop - 1)[None, :, None], v - recurred, error)
            else:
                error = v - recurred
        values = _values(solve, error, PRECISION)
        fold = _fold(recurrence, values, end_k, gates, PRECISION, SLICES)
        queried = tl.zeros((BANDS, L, 16), dtype=tl.float32)
        predicted, recurred = queried, queried
        if LONG and kind == 0:
            recurrence = fold
            if SHARED:
                read = fold
            elif STORED:
                read = _fold(read, values, end_k, gates, PRECISION, SLICES)
            else:
                read = _fold(read, read_values, end_k, gates, PRECISION, SLICES)
            for s in tl.static_range(SLICES):
                queried += readout(next_q[s], read[s], EXACT, PRECISION)
                predicted += readout(next_k[s], read[s], EXACT, PRECISION)
                if not SHARED:
                    recurred += readout(next_k[s], recurrence[s], EXACT, PRECISION)
        else:
            # A shared copy is what the fold was made from: its last token has read the fold already.
            if READS_FOLD and not SHARED:
                last = (stop - 1).to(tl.int64)
                store_readout(
                    fold, q_ptr + last * q_token, o_ptr + last * (heads * d_v) + i, in_v & (kind > 0), d_k, N, SLICES
                )
            state = state_offsets(slot, place, heads, head, i, d_v, d_k, N)
            if slot >= 0:
                store_state(fold_ptr + state, fold, in_v, d_k, N, SLICES)
            noise_at = (seed, position - padding, key, document, part * D_V + origin)
            source, largest, largest_read = plan_copies(
                fold, kind, noise_at, d_k, RECURRENCE_CAST, READ_CAST, CHAINED, SLICES
            )
            recurrence, copy = (), ()
            for s in tl.static_range(SLICES):
                x = read_slice(
                    fold, source, s, largest, largest_read, kind, noise_at, d_k, RECURRENCE_CAST, READ_CAST, SHARED
                )
                queried += readout(next_q[s], x, EXACT, PRECISION)
                predicted += readout(next_k[s], x, EXACT, PRECISION)
                store_slice(read_ptr, state, s, x, slot, in_v, d_k, N)
                if LONG:
                    copy += (x,)
                x = recurrence_slice(x, fold, source, s, largest, kind, noise_at, d_k, RECURRENCE_CAST, SHARED, CHAINED)
                if not SHARED:
                    recurred += readout(next_k[s], x, EXACT, PRECISION)
                recurrence += (x,)
                store_slice(recurrence_ptr, state, s, x, slot, in_v, d_k, N)
            if LONG:
                read = copy
        first, stop, kind, position, slot, origin = (
            first_next,
            stop_next,
            kind_next,
            position_next,
            slot_next,
            origin_next,
        )


@triton.jit
def _decayed_slice(
    x_ptr,
    stride,
    decayed_ptr,
    first,
    stop,
    p,
    s,
    d_k: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Slice s `[L, N]` of the keys or queries of piece p, tokens [first, stop). With CHANNELS the decayed ones."""
    if CHANNELS:
        x = piece_slice(decayed_ptr + p * L * d_k, d_k, first - first, stop - first, s, d_k, N, L)
    else:
        x = piece_slice(x_ptr, stride, first, stop, s, d_k, N, L)
    return x


@triton.jit
def _values(solve, error, PRECISION: tl.constexpr):
    """uᵀ `[BANDS, 16, L]` of the errors `[BANDS, L, 16]`."""
    return tl.permute(product(banded(solve, error.shape[0]), error, False, False, PRECISION), (0, 2, 1))


@triton.jit
def _fold(state, values, end_k, gates, PRECISION: tl.constexpr, SLICES: tl.constexpr):
    fold = ()
    for s in tl.static_range(SLICES):
        update = tl.reshape(product(values, banded(end_k[s], values.shape[0]), False, False, PRECISION), state[s].shape)
        fold += (tl.fma(tl.zeros_like(update) + gates[s], state[s], update),)
    return fold
