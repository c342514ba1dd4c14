"""Device code of the scan where every window is one token: no matrix products; rounding is nearly all of the work."""

import triton
import triton.language as tl

from .cast import cast_slice, has_short_cast, ordinary
from .state_tiles import POSITION, cast_noise, largest_magnitudes, state_offsets, store_state


@triton.jit(do_not_specialize=["pieces", "tokens", "layer"])
def token_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, decay_ptr, o_ptr, recurrence_ptr, read_ptr, fold_ptr,
    row_ptr, place_ptr, seed_ptr, document_ptr, padding_ptr, piece_ptr, pieces,
    q_row, q_token, k_row, k_token, v_row, v_token, tokens, layer, heads, groups,
    d_v: tl.constexpr, d_k: tl.constexpr, D_V: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr,
    RECURRENCE_CAST: tl.constexpr, READ_CAST: tl.constexpr, SHARED: tl.constexpr, CHAINED: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """`window_kernel` where every piece is one token that reads its rounded fold, so that the read copy is never read.

    BY_COLUMN: threads lie along d_v first, so that sums and maxima over a row stay in few threads. DELTA: the delta
    rule. CHANNELS: with α `[R, T, H, d_k]` for decay instead of log α `[R, T, H]`.
    """
    head, member, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(row_ptr + member).to(tl.int64)
    place = tl.load(place_ptr + member).to(tl.int64)
    group = head // (heads // groups)
    seed = tl.load(seed_ptr + member)
    document, padding = tl.load(document_ptr + member), tl.load(padding_ptr + member)
    key = (layer << 17) | (head << 1)
    i = part * D_V + tl.arange(0, D_V)
    in_v = i < d_v
    state = (place * heads + head) * d_v * d_k
    q_ptr += row * q_row + group * d_k
    k_ptr += row * k_row + group * d_k
    WHOLE: tl.constexpr = d_v % D_V == 0 and d_k == N * SLICES
    SHORT: tl.constexpr = BY_COLUMN and has_short_cast(RECURRENCE_CAST)
    recurrence = ()
    for s in tl.static_range(SLICES):
        recurrence += (_load_rows(recurrence_ptr + state, d_k, i, in_v, s, d_k, N, BY_COLUMN, WHOLE),)
    at = state_offsets(0, place, heads, head, i, d_v, d_k, N)
    v_ptr += row * v_row + head * d_v + i
    o_ptr += (row * tokens * heads + head) * d_v + i
    beta_ptr += row * tokens * heads + head
    channels = d_k if CHANNELS else 1
    decay_ptr += (row * tokens * heads + head) * channels
    first = tl.load(piece_ptr + POSITION) - padding  # position of the first token's noise
    decay, beta, v = tl.load(decay_ptr), tl.load(beta_ptr), tl.load(v_ptr, mask=in_v, other=0.0)
    for p in range(pieces):
        unknown = (0 * pieces + p) >> 30  # zero, but the compiler does not know: see below
        # Of the noise. Small programs have the registers to keep its first rounds, which depend on the element only.
        at_row, when = part * D_V if BY_COLUMN else part * D_V + unknown, first + p
        noise = ()
        if SHORT:  # drawn here, it fills the time in which q and k arrive
            for s in tl.static_range(SLICES):
                noise += (cast_noise(seed, when, key, document, at_row, s, d_k, D_V, N, RECURRENCE_CAST, True),)
        gate, strength, u = tl.exp(decay), beta, v.to(tl.float32)
        fold, terms = (), tl.zeros_like(recurrence[0])
        if DELTA:
            decayed = ()
            for s in tl.static_range(SLICES):
                k = _load_rows(k_ptr, 0, i, in_v, s, d_k, N, BY_COLUMN, WHOLE).to(tl.float32)
                if CHANNELS:
                    decayed += (_load_rows(decay_ptr, 0, i, in_v, s, d_k, N, BY_COLUMN, WHOLE) * recurrence[s],)
                else:
                    decayed += (gate * recurrence[s],)
                terms = tl.fma(decayed[s], k, terms)
            u -= tl.sum(terms, axis=1)
            recurrence = decayed
            terms = tl.zeros_like(terms)
        u *= strength
        # What is small is loaded a token ahead.
        ahead = tl.where(pieces > p + 1, 1, 0)
        decay_ptr += ahead * heads * channels
        beta_ptr += ahead * heads
        v_ptr += ahead * v_token
        decay, beta, v = tl.load(decay_ptr), tl.load(beta_ptr), tl.load(v_ptr, mask=in_v, other=0.0)
        for s in tl.static_range(SLICES):
            k = _load_rows(k_ptr, 0, i, in_v, s, d_k, N, BY_COLUMN, WHOLE).to(tl.float32)
            q = _load_rows(q_ptr, 0, i, in_v, s, d_k, N, BY_COLUMN, WHOLE).to(tl.float32)
            fold += (tl.fma(tl.broadcast_to(u[:, None], k.shape), k, recurrence[s] if DELTA else gate * recurrence[s]),)
            terms = tl.fma(fold[s], q, terms)
        o = tl.sum(terms, axis=1)
        tl.store(o_ptr, o, mask=in_v)
        q_ptr += q_token
        k_ptr += k_token
        o_ptr += heads * d_v
        if SHORT:
            largest, smallest = tl.abs(fold[0]), tl.abs(fold[0])
            for s in tl.static_range(1, SLICES):
                largest, smallest = tl.maximum(largest, tl.abs(fold[s])), tl.minimum(smallest, tl.abs(fold[s]))
            largest = tl.max(largest, axis=1)
            # A maximum may ignore a NaN; an output made of one does not.
            largest = tl.where(o == o, largest, float("inf"))
            if ordinary(largest, tl.min(smallest, axis=1), RECURRENCE_CAST):
                recurrence = ()
                bits = largest.to(tl.int32, bitcast=True)
                for s in tl.static_range(SLICES):
                    recurrence += (cast_slice(fold[s], noise[s], bits, True, RECURRENCE_CAST),)
            else:
                # Rare: one element decides, and the other slices still go the short way. The unknown zero keeps the
                # compiler from computing any of it ahead of the branch, for both ways.
                hidden = ()
                for s in tl.static_range(SLICES):
                    hidden += ((fold[s].to(tl.int32, bitcast=True) ^ unknown).to(tl.float32, bitcast=True),)
                bits = largest_magnitudes(hidden, 2, RECURRENCE_CAST, SLICES)
                recurrence = ()
                for s in tl.static_range(SLICES):
                    if ordinary(largest, tl.min(tl.abs(hidden[s]), axis=1), RECURRENCE_CAST):
                        x = cast_slice(hidden[s], noise[s], bits, True, RECURRENCE_CAST)
                    else:
                        x = cast_slice(hidden[s], noise[s], bits, False, RECURRENCE_CAST)
                    recurrence += (x,)
        else:
            recurrence = _cast_token(fold, seed, when, key, document, at_row, d_k, RECURRENCE_CAST, SLICES, BY_COLUMN)
        if pieces == p + 1:
            store_state(fold_ptr + at, fold, in_v, d_k, N, SLICES)
            if not SHARED:
                source = recurrence if CHAINED else fold
                read = _cast_token(source, seed, when, key | 1, document, at_row, d_k, READ_CAST, SLICES, BY_COLUMN)
                store_state(read_ptr + at, read, in_v, d_k, N, SLICES)
    store_state(recurrence_ptr + at, recurrence, in_v, d_k, N, SLICES)
    if SHARED:
        store_state(read_ptr + at, recurrence, in_v, d_k, N, SLICES)


@triton.jit
def _load_rows(
    base, stride, i, in_v, s, d_k: tl.constexpr, N: tl.constexpr, BY_COLUMN: tl.constexpr, WHOLE: tl.constexpr
):
    """Slice s `[D_V, N]` of rows i of a matrix, or with stride 0 of one row for all. WHOLE: nothing lies outside."""
    if BY_COLUMN:
        # With the vectors of 4 on an axis of their own, threads are laid along d_v before d_k.
        j = 0 * i[:, None, None] + 4 * tl.arange(0, N // 4)[None, :, None] + tl.arange(0, 4)[None, None, :] + s * N
        at = base + i[:, None, None] * stride + j
        if WHOLE:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=in_v[:, None, None] & (j < d_k), other=0.0)
        x = tl.reshape(x, (i.shape[0], N))
    else:
        j = 0 * i[:, None] + tl.arange(0, N)[None, :] + s * N
        x = tl.load(base + i[:, None] * stride + j, mask=in_v[:, None] & (j < d_k), other=0.0)
    return x


@triton.jit
def _cast_token(
    x,
    seed,
    position,
    key,
    document,
    origin,
    d_k: tl.constexpr,
    CAST: tl.constexpr,
    SLICES: tl.constexpr,
    BY_COLUMN: tl.constexpr,
):
    """A copy as it reads back."""
    if CAST.lossy:
        largest = largest_magnitudes(x, 2, CAST, SLICES)
        stored = ()
        for s in tl.static_range(SLICES):
            noise = cast_noise(
                seed, position, key, document, origin, s, d_k, x[s].shape[0], x[s].shape[1], CAST, BY_COLUMN
            )
            stored += (cast_slice(x[s], noise, largest, False, CAST),)
    else:
        stored = x
    return stored
