"""Device functions: exact rounding of a state tile, equal bit for bit to `replayssm_emulation`.

The reference works on integers. Here the same results come from fp32 operations that are exact, or round once, where it
matters: adding 2**(23 + q) rounds to a multiple of 2**q to nearest even, and multiplying by a power of two is exact.
Launch with enable_fp_fusion=False: a fused multiply-add rounds once where the reference rounds twice. No value is cast
to fp8 or bf16, whose casts the interpreter gets wrong. Divisions are IEEE, since `/` is approximate on some GPUs.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from replayssm_emulation import Format
from replayssm_emulation.formats import Integer, Minifloat

# Kinds of scale, as compile-time numbers.
NONE, AMAX, E8M0, NVFP4 = (tl.constexpr(i) for i in range(4))
FLOOR, EVEN, RCEIL = (tl.constexpr(i) for i in range(3))
_ALL = tl.constexpr(tl.PropagateNan.ALL)
_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_ONE_SIXTH = tl.constexpr(0.1666666716337204)  # fp32(1/6)
# The interpreter's fused multiply-add rounds twice.
_HAS_FMA = tl.constexpr(not triton.knobs.runtime.interpret)


class Cast(NamedTuple):
    """Compile-time description of a cast. Kernels take it as one `tl.constexpr`. The defaults describe fp32, unrounded.

    lossy: False stores fp32. integer: otherwise a minifloat of `mantissa` bits and exponents min_exponent to
    max_exponent. max: the largest element. scale: NONE, AMAX, E8M0 or NVFP4. block: elements that share a scale, 0 for
    the whole row. scale_rule: FLOOR, EVEN or RCEIL, for E8M0. error_power: 1 or 2 if an NVFP4 block may map its largest
    element to 4, else 0. scale_max: the largest NVFP4 block scale. per_head: one scale for a whole head. noise_bits: 0
    rounds to nearest.
    """

    lossy: bool = False
    integer: bool = False
    mantissa: int = 0
    min_exponent: int = 0
    max: float = 0.0
    max_exponent: int = 0
    scale: int = 0
    block: int = 1
    scale_rule: int = 0
    error_power: int = 0
    scale_max: float = 0.0
    per_head: bool = False
    noise_bits: int = 0


def plan_cast(format: Format, d_k: int, stochastic: bool, noise_bits: int = 32) -> Cast | None:
    """The cast that `cast_slice` does for a format, or None when the device functions cannot do it.

    d_k: width of a row. Blocks must be powers of two, since tiles are.
    """
    element = format.element
    if element is None:
        return Cast()
    whole_row = format.scale == "amax" and (format.per_head or format.block is None or format.block >= d_k)
    block = 0 if whole_row or format.block is None else format.block
    if block & (block - 1):
        return None
    return Cast(
        lossy=True,
        integer=isinstance(element, Integer),
        mantissa=element.mantissa if isinstance(element, Minifloat) else 0,
        min_exponent=element.min_exponent if isinstance(element, Minifloat) else 0,
        max=element.max,
        max_exponent=element.max_exponent if isinstance(element, Minifloat) else 0,
        scale={"none": 0, "amax": 1, "e8m0": 2, "nvfp4": 3}[format.scale],
        block=block,
        scale_rule={"floor": 0, "even": 1, "rceil": 2}[format.scale_rule],
        error_power={"": 0, "mae": 1, "mse": 2}[format.four_over_six],
        scale_max=format.scale_max,
        per_head=format.per_head,
        noise_bits=noise_bits if stochastic else 0,
    )


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _power_of_two(exponent):
    return _float((exponent + 127) << 23)


@triton.jit
def _quotients(a, b):
    """IEEE a / b for a `[.., n]` and b `[.., 1]`, |a| and b >= 2**-103 or a 0, the quotient far from fp32's ends.

    One correction of a·RN(1/b) rounds correctly where the remainder is exact (after Markstein, 1990). Before rounding,
    the corrected quotient is off by at most 2.5·2**-24 of an ulp. A quotient that lies nearer than that to the middle
    between two floats has a remainder of at most 5 units. All of those were tried (52 million).
    """
    if _HAS_FMA:
        inverse = tl.broadcast_to(tl.div_rn(tl.zeros_like(b) + 1.0, b), a.shape)
        negative = tl.broadcast_to(-b, a.shape)
        q = a * inverse
        q = tl.fma(tl.fma(q, negative, a), inverse, q)
    else:
        q = tl.div_rn(a, tl.broadcast_to(b, a.shape))
    return q


@triton.jit
def _add_noise(bits, noise, SHIFT: tl.constexpr, NOISE_BITS: tl.constexpr):
    """Bits of magnitudes, rounded stochastically at bit SHIFT: exact where the value is normal in its format."""
    if NOISE_BITS < SHIFT:
        step = (noise >> (32 - NOISE_BITS)) << (SHIFT - NOISE_BITS)
    else:
        step = noise >> (32 - SHIFT)
    return (bits + step.to(tl.int32)) & (-1 << SHIFT)


@triton.jit
def _round_magnitudes(
    a,
    noise,
    INTEGER: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    MAX: tl.constexpr,
    NOISE_BITS: tl.constexpr,
):
    """a >= 0 (or NaN) on the grid, saturated: nearest even when NOISE_BITS is 0, else stochastic."""
    a = tl.minimum(a, MAX, propagate_nan=_ALL)
    if LEAST == -126:  # bf16: fp32 without its 16 low bits, subnormals included
        bits = _bits(a)
        if NOISE_BITS == 0:
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        else:
            bits = _add_noise(bits, noise, 16, NOISE_BITS)
        rounded = tl.where(a != a, a, _float(bits))
    else:
        # The bits of 2**e, e the exponent of a but not below LEAST: the spacing there is 2**(e - MANTISSA).
        if INTEGER:
            top = tl.zeros_like(_bits(a)) + (127 << 23)
        else:
            top = tl.maximum(_bits(a) & 0x7F800000, (LEAST + 127) << 23)
        if NOISE_BITS == 0:
            magic = _float(top + ((23 - MANTISSA) << 23))
            rounded = (a + magic) - magic
        else:
            quantum = top - (MANTISSA << 23)
            multiple = a * _float((254 << 23) - quantum)
            whole = tl.floor(multiple)
            if NOISE_BITS == 32:
                fraction = ((multiple - whole) * 4294967296.0).to(tl.uint32)
                up = (fraction + noise) < fraction
            else:
                fraction = ((multiple - whole) * (1 << NOISE_BITS)).to(tl.uint32)
                up = fraction + (noise >> (32 - NOISE_BITS)) >= (1 << NOISE_BITS)
            rounded = tl.where(up, whole + 1.0, whole) * _float(quantum)
    return rounded


@triton.jit
def _with_sign(a, x):
    return _float(_bits(a) | (_bits(x) & -2147483648))


@triton.jit
def _halving_sum(x):
    """Sum over the last axis of 16, pairing halves: one fixed order, as in `replayssm_emulation`."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    x = tl.sum(tl.reshape(x, (A, B, 2, 8)), axis=2)
    x = tl.sum(tl.reshape(x, (A, B, 2, 4)), axis=2)
    x = tl.sum(tl.reshape(x, (A, B, 2, 2)), axis=2)
    return tl.sum(x, axis=2)


@triton.jit
def _nvfp4_at(
    a, wanted, decode, noise, MAX: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr, NOISE_BITS: tl.constexpr
):
    # The block scale is E4M3, to nearest.
    scale = _round_magnitudes(wanted, wanted, False, 3, -6, 448.0, 0) * decode
    inverse = tl.minimum(tl.div_rn(tl.zeros_like(scale) + 1.0, scale), _FLT_MAX, propagate_nan=_ALL)
    return _round_magnitudes(a * inverse, noise, False, MANTISSA, LEAST, MAX, NOISE_BITS) * scale


@triton.jit
def largest_of_rows(x, CAST: tl.constexpr):
    """int32 `[D_V]`: the largest magnitude of every row of a slice, as bits; zeros where CAST asks for none.

    Bits order magnitudes as floats do, with infinity and NaN on top.
    """
    largest = tl.zeros((x.shape[0],), dtype=tl.int32)
    if CAST.lossy:
        if CAST.scale == NVFP4 or (CAST.scale == AMAX and CAST.block == 0):
            largest = tl.max(_bits(tl.abs(x)), axis=1)
    return largest


@triton.constexpr_function
def spans_head(CAST):
    """Whether a scale spans the whole head."""
    return CAST.lossy and (CAST.scale == 3 or CAST.per_head)


@triton.jit
def over_head(largest, CAST: tl.constexpr):
    """The largest magnitudes of rows, or of their whole head where the scale spans it."""
    if spans_head(CAST):
        largest = tl.zeros_like(largest) + tl.max(largest, axis=0)
    return largest


@triton.constexpr_function
def has_short_cast(CAST):
    """Whether `ordinary` can hold: for stochastic casts to a minifloat with one scale per row."""
    return (
        CAST.lossy
        and CAST.scale == 1
        and CAST.block == 0
        and CAST.noise_bits > 0
        and not CAST.integer
        and not CAST.per_head
    )


@triton.constexpr_function
def _normal_share(CAST):
    """The smallest normal number as a share of the largest, with a margin for the quotient's rounding."""
    return (1 + 2.0**-20) * 2.0**CAST.min_exponent / CAST.max


@triton.jit
def ordinary(largest, smallest, CAST: tl.constexpr):
    """Whether `cast_slice` may take its short way, by the largest and smallest magnitudes fp32 `[D_V]` of whole rows.

    Then every element rounds as a normal number of the format, far from fp32's ends. The caller rules out NaN.
    """
    found = (
        (largest > 9.5367431640625e-07)
        & (largest < 1.3292279957849159e36)
        & (smallest >= largest * _normal_share(CAST))
    )
    return tl.min(found.to(tl.int32), axis=0) > 0


@triton.jit
def cast_slice(x, noise, largest, SHORT: tl.constexpr, CAST: tl.constexpr):
    """Part `[D_V, n]` of a head's state as it reads back, n a multiple of the format's block.

    noise: uint32 words like x. largest: of all parts by `largest_of_rows` and `over_head`, int32 `[D_V]`.
    Elements outside the head must be zero. SHORT: the caller saw that the rows are `ordinary`.
    """
    LOSSY: tl.constexpr = CAST.lossy
    if not LOSSY:
        stored = x
    elif SHORT:
        amax = _float(largest)[:, None]
        scale = _quotients(amax, tl.zeros_like(amax) + CAST.max)
        # Adding noise to the bits of a negative number moves it away from zero too: no sign to take off and put back.
        quotient = tl.clamp(_quotients(x, scale), -CAST.max, CAST.max)
        stored = _float(_add_noise(_bits(quotient), noise, 23 - CAST.mantissa, CAST.noise_bits)) * scale
    elif CAST.scale == NONE:
        stored = _with_sign(
            _round_magnitudes(
                tl.abs(x), noise, CAST.integer, CAST.mantissa, CAST.min_exponent, CAST.max, CAST.noise_bits
            ),
            x,
        )
    else:
        stored = _cast_blocks(x, noise, largest, CAST)
    return stored


@triton.jit
def _cast_blocks(x, noise, largest, CAST: tl.constexpr):
    """`cast_slice` of a format with scales."""
    INTEGER: tl.constexpr = CAST.integer
    MANTISSA: tl.constexpr = CAST.mantissa
    LEAST: tl.constexpr = CAST.min_exponent
    MAX: tl.constexpr = CAST.max
    LARGEST: tl.constexpr = CAST.max_exponent
    SCALE: tl.constexpr = CAST.scale
    BLOCK: tl.constexpr = CAST.block
    RULE: tl.constexpr = CAST.scale_rule
    POWER: tl.constexpr = CAST.error_power
    SCALE_MAX: tl.constexpr = CAST.scale_max
    NOISE_BITS: tl.constexpr = CAST.noise_bits
    D_V: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    B: tl.constexpr = N if BLOCK == 0 else BLOCK
    a = tl.reshape(tl.abs(x), (D_V, N // B, B))
    words = tl.reshape(noise, (D_V, N // B, B))
    if SCALE == E8M0:
        bits = tl.max(_bits(a), axis=2, keep_dims=True)
        if RULE == FLOOR:
            shared = (bits >> 23) - 127 - LARGEST
        elif RULE == EVEN:
            shared = ((bits + (1 << (22 - MANTISSA))) >> 23) - 127 - LARGEST
        else:
            amax = _float(bits)
            shared = ((_bits(tl.div_rn(amax, tl.zeros_like(amax) + MAX)) + 0x7FFFFF) >> 23) - 127
        shared = tl.minimum(tl.maximum(shared, -127), 127)
        half = shared >> 1
        # A non-finite element makes its block NaN.
        down = tl.where(bits >= 0x7F800000, float("nan"), _power_of_two(-half))
        rounded = _round_magnitudes(
            a * down * _power_of_two(half - shared), words, INTEGER, MANTISSA, LEAST, MAX, NOISE_BITS
        )
        stored = rounded * _power_of_two(half) * _power_of_two(shared - half)
    else:
        if SCALE == AMAX or POWER > 0:  # the other saturates infinity by its own range
            a = tl.minimum(a, _FLT_MAX, propagate_nan=_ALL)
        if BLOCK == 0:
            amax = _float(largest)[:, None, None]
        else:
            amax = _float(tl.max(_bits(a), axis=2, keep_dims=True))
        amax = tl.minimum(amax, _FLT_MAX, propagate_nan=_ALL)
        if SCALE == AMAX:
            scale = tl.div_rn(amax, tl.zeros_like(amax) + MAX)
            scale = tl.where(scale == 0.0, 1.0, scale)
            # `_quotients` wants nothing tiny: 2**100 leaves the quotient as it is. An element that is tiny beside a
            # larger scale lies far below every format's grid.
            up = tl.where(amax < 9.5367431640625e-07, 1.2676506002282294e30, 1.0)
            quotient = _quotients(a * up, tl.where(amax == 0.0, 1.0, scale * up))
            stored = _round_magnitudes(quotient, words, INTEGER, MANTISSA, LEAST, MAX, NOISE_BITS) * scale
            # A quotient may exceed the largest code by an ulp and dequantise past fp32's range.
            stored = tl.minimum(stored, _FLT_MAX, propagate_nan=_ALL)
        else:
            amax_head = tl.minimum(_float(largest), _FLT_MAX, propagate_nan=_ALL)[:, None, None]
            encode = tl.minimum(
                tl.div_rn(tl.zeros_like(amax_head) + MAX * SCALE_MAX, amax_head), _FLT_MAX, propagate_nan=_ALL
            )
            encode = tl.where((amax_head == 0.0) | (encode == 0.0), 1.0, encode)
            decode = tl.div_rn(tl.zeros_like(encode) + 1.0, encode)
            wanted = amax * (encode * _ONE_SIXTH)
            stored = _nvfp4_at(a, wanted, decode, words, MAX, MANTISSA, LEAST, NOISE_BITS)
            if POWER > 0:
                other = _nvfp4_at(a, wanted * 1.5, decode, words, MAX, MANTISSA, LEAST, NOISE_BITS)
                error, other_error = tl.abs(stored - a), tl.abs(other - a)
                if POWER == 2:
                    error, other_error = error * error, other_error * other_error
                better = _halving_sum(other_error) < _halving_sum(error)
                stored = tl.where(tl.expand_dims(better, 2), other, stored)
    return _with_sign(tl.reshape(stored, (D_V, N)), x)


@triton.jit
def _wide(a, FACTOR: tl.constexpr):
    """High and low word of a 32 x 32 bit product: one instruction, where two separate products are two."""
    product = a.to(tl.uint64) * FACTOR
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _philox4x32(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 (Salmon et al., 2011). Counters of any shape: what is a number for the whole tile stays one."""
    for _ in tl.static_range(10):
        high_0, low_0 = _wide(c0, 0xD2511F53)
        high_1, low_1 = _wide(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def slice_noise(
    seed,
    position,
    layer_head_copy,
    document,
    quads,
    row,
    column,
    D_V: tl.constexpr,
    N: tl.constexpr,
    BY_COLUMN: tl.constexpr,
):
    """uint32 words `[D_V, N]` of the part of a head's state at (row, column). column: a multiple of 4.

    quads = ceil(d_k / 4).
    BY_COLUMN: threads lie along d_v first. Every word of a Philox block is used. See `replayssm_emulation.state_noise`.
    """
    i, quad = tl.arange(0, D_V), tl.arange(0, N // 4) + column // 4
    BANDS: tl.constexpr = 1 if BY_COLUMN else D_V // 16
    # The compiler deals rows out to warps in turn, RUN at a time, but the state in bands of 16. In this order each warp
    # draws the noise of its own band.
    RUN: tl.constexpr = max(1, min(16, 128 // N))
    if BANDS > 1:
        i = (i // RUN) % BANDS * 16 + i // (RUN * BANDS) * RUN + i % RUN
    i += row
    c0 = i[None, :] * quads + quad[:, None] if BY_COLUMN else i[:, None] * quads + quad[None, :]
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    a, b, c, d = _philox4x32(
        c0.to(tl.uint32), position.to(tl.uint32), layer_head_copy.to(tl.uint32), document.to(tl.uint32), low, high
    )
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    if BY_COLUMN:
        words = tl.reshape(tl.permute(tl.reshape(words, (N // 4, D_V, 4)), (1, 0, 2)), (D_V, N))
    if BANDS > 1:
        words = tl.reshape(tl.permute(tl.reshape(words, (16 // RUN, BANDS, RUN, N)), (1, 0, 2, 3)), (D_V, N))
    return words
