"""Device code of the plain scan. A program per row, head and part of d_v walks the windows, copies in registers.

A window is read in pieces of up to 16 tokens. Both copies run on unrounded between the pieces of a longer window, and
in an unfinished one.

    prepare   all pieces at once, without the state: M_ij = q_i·k_j β_j exp(G_i - G_j) for j <= i
    window    o_i = Σ_j M_ij v_j + exp(G_i) S_read q_i;   fold = exp(G_L) S + Σ_j v_j (β_j exp(G_L - G_j) k_j)ᵀ
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
def prepare_kernel(
    q_ptr, k_ptr, beta_ptr, decay_ptr, mix_ptr, from_start_ptr, to_end_ptr, row_ptr, piece_ptr,
    q_row, q_token, k_row, k_token, tokens, heads, groups,
    d_k: tl.constexpr, D_K: tl.constexpr, L: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (pieces, members, groups). mix `[members, P, H, L (i), L (j)]`; from_start, to_end `[members, P, H, L]`."""
    piece, member, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(row_ptr + member).to(tl.int64)
    first = tl.load(piece_ptr + COLUMNS * piece + FIRST)
    stop = tl.load(piece_ptr + COLUMNS * piece + STOP)
    j, t = tl.arange(0, D_K), tl.arange(0, L)
    live = first + t < stop
    token = (first + t).to(tl.int64)
    inside = live[:, None] & (j < d_k)[None, :]
    q = tl.load(q_ptr + row * q_row + token[:, None] * q_token + group * d_k + j[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    k = tl.load(k_ptr + row * k_row + token[:, None] * k_token + group * d_k + j[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    scores = product(q, tl.trans(k), EXACT, EXACT, PRECISION)
    share = heads // groups
    for head in range(group * share, (group + 1) * share):
        at_head = (row * tokens + token) * heads + head
        g = tl.cumsum(tl.load(decay_ptr + at_head, mask=live, other=0.0), axis=0)
        beta = tl.load(beta_ptr + at_head, mask=live, other=0.0)
        last = tl.sum(tl.where(t == L - 1, g, 0.0), axis=0)
        between = tl.exp(tl.where(t[:, None] >= t[None, :], g[:, None] - g[None, :], float("-inf")))
        at = (member.to(tl.int64) * tl.num_programs(0) + piece) * heads + head
        tl.store(mix_ptr + at * L * L + t[:, None] * L + t[None, :], scores * between * beta[None, :])
        tl.store(from_start_ptr + at * L + t, tl.exp(g))
        tl.store(to_end_ptr + at * L + t, beta * tl.exp(last - g))


@triton.jit(do_not_specialize=["pieces", "tokens", "layer"])
def window_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, mix_ptr, from_start_ptr, to_end_ptr, recurrence_ptr, read_ptr, fold_ptr,
    row_ptr, place_ptr, seed_ptr, document_ptr, padding_ptr, piece_ptr, pieces,
    q_row, q_token, k_row, k_token, v_row, v_token, tokens, layer, heads, groups,
    d_v: tl.constexpr, d_k: tl.constexpr, D_V: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr, L: tl.constexpr,
    RECURRENCE_CAST: tl.constexpr, READ_CAST: tl.constexpr, SHARED: tl.constexpr, CHAINED: tl.constexpr,
    READS_FOLD: tl.constexpr,
    LONG: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (heads, members, parts of d_v). piece `[P, 6]`: see `launch.Piece`. LONG: some window has several pieces.

    The compiler cannot know slot and origin. Otherwise it computes the addresses of the copies, and the first rounds of
    Philox, once for all pieces, and holds them in registers, which are too few. No read depends on a branch: the
    compiler may then fetch a piece ahead. A last, unfinished window is folded like the others, and not kept.

    A state is a tuple of SLICES tiles `[D_V, N]` along d_k: the operands of a cast are then alive for one slice at a
    time. The read copy is needed once, by the product with the next piece's q. That product is formed as soon as the
    copy is. So one state, not two, is alive from one piece to the next, except in LONG windows.
    """
    head, member, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(row_ptr + member).to(tl.int64)
    place = tl.load(place_ptr + member).to(tl.int64)
    group = head // (heads // groups)
    seed = tl.load(seed_ptr + member)
    document, padding = tl.load(document_ptr + member), tl.load(padding_ptr + member)
    key = (layer << 17) | (head << 1)
    i, t = part * D_V + tl.arange(0, D_V), tl.arange(0, L)
    in_v = i < d_v
    state = state_offsets(0, place, heads, head, i, d_v, d_k, N)
    q_ptr += row * q_row + group * d_k
    k_ptr += row * k_row + group * d_k
    v_ptr += row * v_row + head * d_v
    o_ptr += (row * tokens * heads + head) * d_v

    recurrence, read = load_copies(recurrence_ptr, read_ptr, state, in_v, d_k, N, SLICES)
    # The row of the next piece is loaded a piece ahead: what a piece loads waits for no table.
    first, stop, kind, position, slot, origin = piece_row(piece_ptr, 0, pieces)
    # Products are batched over bands of 16 rows, one per warp: what a warp reads of the state it has made itself.
    BANDS: tl.constexpr = D_V // 16
    column = part * D_V + tl.arange(0, BANDS)[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    from_read = tl.zeros((BANDS, L, 16), dtype=tl.float32)
    for s in tl.static_range(SLICES):
        q = piece_slice(q_ptr, q_token, first, stop, s, d_k, N, L)
        from_read += readout(q, read[s], EXACT, PRECISION)
    for p in range(pieces):
        first_next, stop_next, kind_next, position_next, slot_next, origin_next = piece_row(piece_ptr, p + 1, pieces)
        k, q_next = (), ()
        for s in tl.static_range(SLICES):
            k += (piece_slice(k_ptr, k_token, first, stop, s, d_k, N, L),)
            q_next += (piece_slice(q_ptr, q_token, first_next, stop_next, s, d_k, N, L),)
        live = first + t < stop
        token = (first + t).to(tl.int64)
        at = ((member * pieces + p).to(tl.int64) * heads + head) * L
        in_piece = live[None, :, None] & (column < d_v)
        v = tl.load(v_ptr + token[None, :, None] * v_token + column, mask=in_piece, other=0.0).to(tl.float32)
        mix = tl.load(mix_ptr + at * L + t[:, None] * L + t[None, :])
        from_start, to_end = tl.load(from_start_ptr + at + t), tl.load(to_end_ptr + at + t)
        gate = tl.load(from_start_ptr + at + L - 1)
        o = from_read * from_start[None, :, None] + product(banded(mix, BANDS), v, False, EXACT, PRECISION)
        tl.store(o_ptr + token[None, :, None] * (heads * d_v) + column, o, mask=in_piece)
        values = tl.permute(v, (0, 2, 1))
        fold, running = (), ()
        for s in tl.static_range(SLICES):
            delta = product(values, banded(k[s].to(tl.float32) * to_end[:, None], BANDS), EXACT, False, PRECISION)
            delta = tl.reshape(delta, (D_V, N))
            fold += (tl.fma(tl.zeros_like(delta) + gate, recurrence[s], delta),)
            if LONG:
                running += (tl.fma(tl.zeros_like(delta) + gate, read[s], delta),)
        if LONG and kind == 0:
            recurrence = fold
            read = running
            from_read = tl.zeros_like(from_read)
            for s in tl.static_range(SLICES):
                from_read += readout(q_next[s], read[s], EXACT, PRECISION)
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
            from_read = tl.zeros_like(from_read)
            for s in tl.static_range(SLICES):
                x = read_slice(
                    fold, source, s, largest, largest_read, kind, noise_at, d_k, RECURRENCE_CAST, READ_CAST, SHARED
                )
                from_read += readout(q_next[s], x, EXACT, PRECISION)
                store_slice(read_ptr, state, s, x, slot, in_v, d_k, N)
                if LONG:
                    copy += (x,)
                x = recurrence_slice(x, fold, source, s, largest, kind, noise_at, d_k, RECURRENCE_CAST, SHARED, CHAINED)
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
