"""Device functions that the kernels share: the table of pieces, products, tiles of a state, and casts of the copies.

A copy of a state is a tuple of SLICES tiles `[D_V, N]` along d_k. Products run on tensor cores in TF32. Each fp32
operand is split into two parts of 11 bits (after Ootomo and Yokota, 2022). Inputs of 16 bits fit one part: two products
then replace three.
"""

import triton
import triton.language as tl

from .cast import cast_slice, largest_of_rows, over_head, slice_noise

# Columns of the table of pieces, one row per `launch.Piece`.
FIRST, STOP, KIND, POSITION, SLOT, ORIGIN, COLUMNS = (tl.constexpr(i) for i in range(7))


@triton.jit
def head_part(x):
    """The upper 11 bits of a significand: what a TF32 product takes of it."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, A_EXACT: tl.constexpr, B_EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """fp32-accurate a·b; an EXACT operand is known to fit 11 bits."""
    if PRECISION != "tf32x2":
        o = tl.dot(a, b, input_precision=PRECISION)
    elif A_EXACT and B_EXACT:
        o = tl.dot(a, b, input_precision="tf32")
    elif A_EXACT:
        upper = head_part(b)
        o = tl.dot(a, b - upper, input_precision="tf32")
        o = tl.dot(a, upper, o, input_precision="tf32")
    elif B_EXACT:
        upper = head_part(a)
        o = tl.dot(a - upper, b, input_precision="tf32")
        o = tl.dot(upper, b, o, input_precision="tf32")
    else:
        a_upper, b_upper = head_part(a), head_part(b)
        o = tl.dot(a - a_upper, b_upper, input_precision="tf32")
        o = tl.dot(a_upper, b - b_upper, o, input_precision="tf32")
        o = tl.dot(a_upper, b_upper, o, input_precision="tf32")
    return o


@triton.jit
def banded(x, BANDS: tl.constexpr):
    """The same matrix for every band."""
    return tl.broadcast_to(x[None, :, :], (BANDS, x.shape[0], x.shape[1]))


@triton.jit
def readout(q, state, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """q `[L, N]` times a slice `[D_V, N]` of the state: `[BANDS, L, 16]`."""
    BANDS: tl.constexpr = state.shape[0] // 16
    bands = tl.permute(tl.reshape(state, (BANDS, 16, state.shape[1])), (0, 2, 1))
    return product(banded(q.to(tl.float32), BANDS), bands, EXACT, False, PRECISION)


@triton.jit
def piece_row(piece_ptr, p, pieces):
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
def piece_slice(x_ptr, stride, first, stop, s, d_k: tl.constexpr, N: tl.constexpr, L: tl.constexpr):
    """Slice s of q or k of tokens [first, stop), `[L, N]`, zero past the end."""
    t, j = tl.arange(0, L), tl.arange(0, N) + s * N
    inside = (first + t < stop)[:, None] & (j < d_k)[None, :]
    return tl.load(x_ptr + (first + t).to(tl.int64)[:, None] * stride + j[None, :], mask=inside, other=0.0)


@triton.jit
def store_readout(fold, q_ptr, o_ptr, in_v, d_k: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr):
    """The output of a token that reads the fold."""
    o = tl.zeros((fold[0].shape[0],), dtype=tl.float32)
    for s in tl.static_range(SLICES):
        j = tl.arange(0, N) + s * N
        o += tl.sum(fold[s] * tl.load(q_ptr + j, mask=j < d_k, other=0.0).to(tl.float32)[None, :], axis=1)
    tl.store(o_ptr, o, mask=in_v)


@triton.jit
def state_offsets(slot, place, heads, head, i, d_v: tl.constexpr, d_k: tl.constexpr, N: tl.constexpr):
    """Offsets of the first slice of a head's state."""
    return ((slot + place) * heads + head) * d_v * d_k + i[:, None] * d_k + tl.arange(0, N)[None, :]


@triton.jit
def store_state(at, state, in_v, d_k: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr):
    for s in tl.static_range(SLICES):
        j = tl.arange(0, N) + s * N
        tl.store(at + s * N, state[s], mask=in_v[:, None] & (j < d_k)[None, :])


@triton.jit
def largest_magnitudes(x, kind, CAST: tl.constexpr, SLICES: tl.constexpr):
    """The largest magnitudes that `cast_slice` wants."""
    largest = tl.zeros((x[0].shape[0],), dtype=tl.int32)
    if CAST.lossy:
        if kind == 2:
            for s in tl.static_range(SLICES):
                largest = tl.maximum(largest, largest_of_rows(x[s], CAST))
            largest = over_head(largest, CAST)
    return largest


@triton.jit
def cast_copy(x, s, largest, kind, noise_at, COPY: tl.constexpr, d_k: tl.constexpr, CAST: tl.constexpr):
    """Slice s of a copy as it reads back; kind 1 keeps it as it is. noise_at: (seed, position, key, document, row)."""
    if CAST.lossy:
        if kind == 2:
            seed, position, key, document, origin = noise_at
            noise = cast_noise(
                seed, position, key | COPY, document, origin, s, d_k, x.shape[0], x.shape[1], CAST, False
            )
            x = cast_slice(x, noise, largest, False, CAST)
    return x


@triton.jit
def load_copies(recurrence_ptr, read_ptr, state, in_v, d_k: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr):
    """(recurrence copy, read copy), each a tuple of SLICES tiles."""
    recurrence, read = (), ()
    for s in tl.static_range(SLICES):
        inside = in_v[:, None] & (tl.arange(0, N) + s * N < d_k)[None, :]
        recurrence += (tl.load(recurrence_ptr + state + s * N, mask=inside, other=0.0),)
        read += (tl.load(read_ptr + state + s * N, mask=inside, other=0.0),)
    return recurrence, read


@triton.jit
def plan_copies(
    fold, kind, noise_at, d_k: tl.constexpr,
    RECURRENCE_CAST: tl.constexpr, READ_CAST: tl.constexpr, CHAINED: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """(source, largest, largest_read): the read copy is cast from source; the largest magnitudes of fold and source."""
    largest = largest_magnitudes(fold, kind, RECURRENCE_CAST, SLICES)
    source = fold
    if CHAINED:
        source = ()
        for s in tl.static_range(SLICES):
            source += (cast_copy(fold[s], s, largest, kind, noise_at, 0, d_k, RECURRENCE_CAST),)
    return source, largest, largest_magnitudes(source, kind, READ_CAST, SLICES)


@triton.jit
def read_slice(
    fold, source, s, largest, largest_read, kind, noise_at, d_k: tl.constexpr,
    RECURRENCE_CAST: tl.constexpr, READ_CAST: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Slice s of the new read copy."""
    if SHARED:
        x = cast_copy(fold[s], s, largest, kind, noise_at, 0, d_k, RECURRENCE_CAST)
    else:
        x = cast_copy(source[s], s, largest_read, kind, noise_at, 1, d_k, READ_CAST)
    return x


@triton.jit
def recurrence_slice(
    read, fold, source, s, largest, kind, noise_at, d_k: tl.constexpr,
    RECURRENCE_CAST: tl.constexpr, SHARED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Slice s of the new recurrence copy. read: the same slice of the read copy, which a shared copy is."""
    if CHAINED:
        x = source[s]
    elif SHARED:
        x = read
    else:
        x = cast_copy(fold[s], s, largest, kind, noise_at, 0, d_k, RECURRENCE_CAST)
    return x


@triton.jit
def store_slice(ptr, state, s, x, slot, in_v, d_k: tl.constexpr, N: tl.constexpr):
    """Slice s of a copy, where it is kept."""
    if slot >= 0:
        tl.store(ptr + state + s * N, x, mask=in_v[:, None] & (tl.arange(0, N) + s * N < d_k)[None, :])


@triton.jit
def cast_noise(
    seed, position, key, document, origin, s,
    d_k: tl.constexpr, D_V: tl.constexpr, N: tl.constexpr, CAST: tl.constexpr, BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """Noise of slice s, which a cast to nearest does not draw."""
    if CAST.noise_bits == 0:
        noise = tl.zeros((D_V, N), dtype=tl.uint32)
    else:
        noise = slice_noise(seed, position, key, document, (d_k + 3) // 4, origin, s * N, D_V, N, BY_COLUMN)
    return noise
