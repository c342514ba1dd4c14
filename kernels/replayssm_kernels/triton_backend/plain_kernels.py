"""Device code of the replay scan: a program per row, head and part of d_v walks the windows with the copies in registers.

A window is read in pieces of up to 16 tokens; both copies run on unrounded between the pieces of a longer window and in an
unfinished one.

    prepare   what does not depend on the state, all pieces at once: M_ij = q_i·k_j β_j exp(G_i - G_j) for j <= i
    window    o_i = Σ_j M_ij v_j + exp(G_i) S_read q_i;   fold = exp(G_L) S + Σ_j v_j (β_j exp(G_L - G_j) k_j)ᵀ

Products run on tensor cores in TF32, each fp32 operand split into two parts of 11 bits (after Ootomo and Yokota, 2022).
Inputs of 16 bits fit one part, so two products replace three.
"""

import triton
import triton.language as tl

from .cast import cast_slice, largest_of_rows, over_head, slice_noise

# Columns of the table of pieces, one row per `launch.Piece`.
FIRST, STOP, KIND, POSITION, SLOT, ORIGIN, COLUMNS = (tl.constexpr(i) for i in range(7))


@triton.jit
def _head_part(x):
    """The upper 11 bits of a significand: what a TF32 product takes of it."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _dot(a, b, A_EXACT: tl.constexpr, B_EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """fp32-accurate a·b; an EXACT operand is known to fit 11 bits."""
    if PRECISION != "tf32x2":
        o = tl.dot(a, b, input_precision=PRECISION)
    elif A_EXACT and B_EXACT:
        o = tl.dot(a, b, input_precision="tf32")
    elif A_EXACT:
        upper = _head_part(b)
        o = tl.dot(a, b - upper, input_precision="tf32")
        o = tl.dot(a, upper, o, input_precision="tf32")
    elif B_EXACT:
        upper = _head_part(a)
        o = tl.dot(a - upper, b, input_precision="tf32")
        o = tl.dot(upper, b, o, input_precision="tf32")
    else:
        a_upper, b_upper = _head_part(a), _head_part(b)
        o = tl.dot(a - a_upper, b_upper, input_precision="tf32")
        o = tl.dot(a_upper, b - b_upper, o, input_precision="tf32")
        o = tl.dot(a_upper, b_upper, o, input_precision="tf32")
    return o


@triton.jit(do_not_specialize=["tokens"])
def prepare_kernel(
    q_ptr, k_ptr, beta_ptr, decay_ptr, mix_ptr, from_start_ptr, to_end_ptr, row_ptr, piece_ptr,
    q_row, q_token, k_row, k_token, tokens, heads, groups,
    d_k: tl.constexpr, D_K: tl.constexpr, L: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (pieces, members, groups). mix `[members, P, H, L (i), L (j)]`, from_start and to_end `[members, P, H, L]`."""
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
    scores = _dot(q, tl.trans(k), EXACT, EXACT, PRECISION)
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
    RECURRENCE_CAST: tl.constexpr, READ_CAST: tl.constexpr, SHARED: tl.constexpr, CHAINED: tl.constexpr, READS_FOLD: tl.constexpr,
    LONG: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (heads, members, parts of d_v).

    piece `[P, 6]`: first token, end, kind (0 the window goes on, 1 unrounded fold, 2 rounded fold), position of the fold,
    slot: where the fold and the copies made from it are kept, -1 for nowhere, origin: 0. LONG: some window has several
    pieces. The rest as in `scan_triton._launches`.

    Slot and origin are numbers that the compiler cannot know: otherwise it computes the addresses of the copies, and the
    first rounds of Philox, once for all pieces and holds them in registers, of which there are too few. No read depends on a
    branch: the compiler may then fetch a piece ahead. A last, unfinished window is folded like the others, and not kept.

    A state is a tuple of SLICES tiles `[D_V, N]` along d_k: what one cast needs is then alive for one slice at a time. The
    read copy is needed once, by the product with the next piece's q: that is formed as soon as the copy is, so that (but in
    LONG windows) one state and not two is alive from one piece to the next.
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
    state = _state(0, place, heads, head, i, d_v, d_k, N)
    q_ptr += row * q_row + group * d_k
    k_ptr += row * k_row + group * d_k
    v_ptr += row * v_row + head * d_v
    o_ptr += (row * tokens * heads + head) * d_v

    recurrence, read = (), ()
    for s in tl.static_range(SLICES):
        inside = in_v[:, None] & (j + s * N < d_k)[None, :]
        recurrence += (tl.load(recurrence_ptr + state + s * N, mask=inside, other=0.0),)
        read += (tl.load(read_ptr + state + s * N, mask=inside, other=0.0),)
    # The row of the next piece is loaded a piece ahead: what a piece loads waits for no table.
    first, stop, kind, position, slot, origin = _table(piece_ptr, 0, pieces)
    # Products are batched over bands of 16 rows, one per warp: what a warp reads of the state it has made itself.
    BANDS: tl.constexpr = D_V // 16
    column = part * D_V + tl.arange(0, BANDS)[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    from_read = tl.zeros((BANDS, L, 16), dtype=tl.float32)
    for s in tl.static_range(SLICES):
        q = _piece_slice(q_ptr, q_token, first, stop, s, d_k, N, L)
        from_read += _readout(q, read[s], EXACT, PRECISION)
    for p in range(pieces):
        first_next, stop_next, kind_next, position_next, slot_next, origin_next = _table(piece_ptr, p + 1, pieces)
        k, q_next = (), ()
        for s in tl.static_range(SLICES):
            k += (_piece_slice(k_ptr, k_token, first, stop, s, d_k, N, L),)
            q_next += (_piece_slice(q_ptr, q_token, first_next, stop_next, s, d_k, N, L),)
        live = first + t < stop
        token = (first + t).to(tl.int64)
        at = ((member * pieces + p).to(tl.int64) * heads + head) * L
        in_piece = live[None, :, None] & (column < d_v)
        v = tl.load(v_ptr + token[None, :, None] * v_token + column, mask=in_piece, other=0.0).to(tl.float32)
        mix = tl.load(mix_ptr + at * L + t[:, None] * L + t[None, :])
        from_start, to_end = tl.load(from_start_ptr + at + t), tl.load(to_end_ptr + at + t)
        gate = tl.load(from_start_ptr + at + L - 1)
        o = from_read * from_start[None, :, None] + _dot(_banded(mix, BANDS), v, False, EXACT, PRECISION)
        tl.store(o_ptr + token[None, :, None] * (heads * d_v) + column, o, mask=in_piece)
        values = tl.permute(v, (0, 2, 1))
        fold, running = (), ()
        for s in tl.static_range(SLICES):
            delta = _dot(values, _banded(k[s].to(tl.float32) * to_end[:, None], BANDS), EXACT, False, PRECISION)
            delta = tl.reshape(delta, (D_V, N))
            fold += (tl.fma(tl.zeros_like(delta) + gate, recurrence[s], delta),)
            if LONG:
                running += (tl.fma(tl.zeros_like(delta) + gate, read[s], delta),)
        if LONG and kind == 0:
            recurrence = fold
            read = running
            from_read = tl.zeros_like(from_read)
            for s in tl.static_range(SLICES):
                from_read += _readout(q_next[s], read[s], EXACT, PRECISION)
        else:
            # A shared copy is what the fold was made from: its last token has read the fold already.
            if READS_FOLD and not SHARED:
                last = (stop - 1).to(tl.int64)
                _store_readout(
                    fold, q_ptr + last * q_token, o_ptr + last * (heads * d_v) + i, in_v & (kind > 0), d_k, N, SLICES
                )
            state = _state(slot, place, heads, head, i, d_v, d_k, N)
            if slot >= 0:
                _store_state(fold_ptr + state, fold, in_v, d_k, N, SLICES)
            at_row, when = part * D_V + origin, position - padding  # of the noise
            largest = _largest(fold, kind, RECURRENCE_CAST, SLICES)
            source = fold
            if CHAINED:
                source = ()
                for s in tl.static_range(SLICES):
                    source += (
                        _cast(fold[s], s, largest, kind, seed, when, key, document, at_row, d_k, RECURRENCE_CAST),
                    )
            largest_read = _largest(source, kind, READ_CAST, SLICES)
            recurrence, copy = (), ()
            from_read = tl.zeros_like(from_read)
            for s in tl.static_range(SLICES):
                if SHARED:
                    x = _cast(fold[s], s, largest, kind, seed, when, key, document, at_row, d_k, RECURRENCE_CAST)
                else:
                    x = _cast(source[s], s, largest_read, kind, seed, when, key | 1, document, at_row, d_k, READ_CAST)
                from_read += _readout(q_next[s], x, EXACT, PRECISION)
                inside = in_v[:, None] & (j + s * N < d_k)[None, :]
                if slot >= 0:
                    tl.store(read_ptr + state + s * N, x, mask=inside)
                if LONG:
                    copy += (x,)
                if CHAINED:
                    x = source[s]
                elif not SHARED:
                    x = _cast(fold[s], s, largest, kind, seed, when, key, document, at_row, d_k, RECURRENCE_CAST)
                recurrence += (x,)
                if slot >= 0:
                    tl.store(recurrence_ptr + state + s * N, x, mask=inside)
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
def _banded(x, BANDS: tl.constexpr):
    """The same matrix for every band."""
    return tl.broadcast_to(x[None, :, :], (BANDS, x.shape[0], x.shape[1]))


@triton.jit
def _readout(q, state, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """q `[L, N]` times a slice `[D_V, N]` of the state: `[BANDS, L, 16]`."""
    BANDS: tl.constexpr = state.shape[0] // 16
    bands = tl.permute(tl.reshape(state, (BANDS, 16, state.shape[1])), (0, 2, 1))
    return _dot(_banded(q.to(tl.float32), BANDS), bands, EXACT, False, PRECISION)


@triton.jit
def _table(piece_ptr, p, pieces):
    """Row p of the table of pieces, of no tokens past its end."""
    row = piece_ptr + COLUMNS * p
    there = p < pieces
    return (
        tl.load(row + FIRST, mask=there, other=0),
        tl.load(row + STOP, mask=there, other=0),
        tl.load(row + KIND, mask=there, other=0),
        tl.load(row + POSITION, mask=there, other=0),
        tl.load(row + SLOT, mask=there, other=-1),
        tl.load(row + ORIGIN, mask=there, other=0),
    )


@triton.jit
def _piece_slice(x_ptr, stride, first, stop, s, d_k: tl.constexpr, N: tl.constexpr, L: tl.constexpr):
    """Slice s of q or k of tokens [first, stop), `[L, N]`, zero past the end."""
    t, j = tl.arange(0, L), tl.arange(0, N) + s * N
    inside = (first + t < stop)[:, None] & (j < d_k)[None, :]
    return tl.load(x_ptr + (first + t).to(tl.int64)[:, None] * stride + j[None, :], mask=inside, other=0.0)


@triton.jit
def _store_readout(fold, q_ptr, o_ptr, in_v, d_k: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr):
    """The output of a token that reads the fold."""
    o = tl.zeros((fold[0].shape[0],), dtype=tl.float32)
    for s in tl.static_range(SLICES):
        j = tl.arange(0, N) + s * N
        o += tl.sum(fold[s] * tl.load(q_ptr + j, mask=j < d_k, other=0.0).to(tl.float32)[None, :], axis=1)
    tl.store(o_ptr, o, mask=in_v)


@triton.jit
def _state(slot, place, heads, head, i, d_v: tl.constexpr, d_k: tl.constexpr, N: tl.constexpr):
    """Offsets of the first slice of a head's state."""
    return ((slot + place) * heads + head) * d_v * d_k + i[:, None] * d_k + tl.arange(0, N)[None, :]


@triton.jit
def _store_state(at, state, in_v, d_k: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr):
    for s in tl.static_range(SLICES):
        j = tl.arange(0, N) + s * N
        tl.store(at + s * N, state[s], mask=in_v[:, None] & (j < d_k)[None, :])


@triton.jit
def _largest(x, kind, CAST: tl.constexpr, SLICES: tl.constexpr):
    """The largest magnitudes that `cast_slice` wants."""
    largest = tl.zeros((x[0].shape[0],), dtype=tl.int32)
    if CAST.lossy:
        if kind == 2:
            for s in tl.static_range(SLICES):
                largest = tl.maximum(largest, largest_of_rows(x[s], CAST))
            largest = over_head(largest, CAST)
    return largest


@triton.jit
def _cast(x, s, largest, kind, seed, position, key, document, origin, d_k: tl.constexpr, CAST: tl.constexpr):
    """Slice s of a copy as it reads back; kind 1 keeps it as it is."""
    if CAST.lossy:
        if kind == 2:
            noise = _noise(seed, position, key, document, origin, s, d_k, x.shape[0], x.shape[1], CAST, False)
            x = cast_slice(x, noise, largest, False, CAST)
    return x


@triton.jit
def _noise(
    seed, position, key, document, origin, s,
    d_k: tl.constexpr, D_V: tl.constexpr, N: tl.constexpr, CAST: tl.constexpr, BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """Noise of slice s, which a cast to nearest does not draw."""
    if CAST.noise_bits == 0:
        noise = tl.zeros((D_V, N), dtype=tl.uint32)
    else:
        noise = slice_noise(seed, position, key, document, (d_k + 3) // 4, origin, s * N, D_V, N, BY_COLUMN)
    return noise
