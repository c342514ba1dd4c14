"""Device functions: exact rounding of a state tile, equal bit for bit to `replayssm_emulation`.

The same integer arithmetic on fp32 bit patterns as `replayssm_emulation.rounding`. Launch with enable_fp_fusion=False: a
fused multiply-add rounds once where the reference rounds twice. No value is ever cast to fp8 or bf16, whose casts the
interpreter gets wrong; divisions are `div_rn`, since `/` is approximate on some GPUs.
"""

import triton
import triton.language as tl
from replayssm_emulation import Format
from replayssm_emulation.formats import Integer, Minifloat

# Kinds of scale, as compile-time numbers.
NONE, AMAX, E8M0, NVFP4 = (tl.constexpr(i) for i in range(4))
FLOOR, EVEN, RCEIL = (tl.constexpr(i) for i in range(3))
_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_ONE_SIXTH = tl.constexpr(0.1666666716337204)  # fp32(1/6)


def cast_constants(format: Format, d_k: int, stochastic: bool, noise_bits: int = 32) -> tuple | None:
    """Compile-time description of a cast for `cast_tile`: None when the tile functions cannot do it.

    d_k: width of a row. Blocks must be powers of two, since tiles are.
    """
    element = format.element
    if element is None:
        return (False, False, 0, 0, 0.0, 0, 0, 1, 0, 0, 0.0, False, 0)
    whole_row = format.scale == "amax" and (format.per_head or format.block is None or format.block >= d_k)
    block = 0 if whole_row or format.block is None else format.block
    if block & (block - 1):
        return None
    integer = isinstance(element, Integer)
    mantissa, least, largest = (
        (element.mantissa, element.min_exponent, element.max_exponent) if isinstance(element, Minifloat) else (0, 0, 0)
    )
    scale = {"none": 0, "amax": 1, "e8m0": 2, "nvfp4": 3}[format.scale]
    rule = {"floor": 0, "even": 1, "rceil": 2}[format.scale_rule]
    power = {"": 0, "mae": 1, "mse": 2}[format.four_over_six]
    bits = noise_bits if stochastic else 0
    return (True, integer, mantissa, least, element.max, largest, scale, block, rule, power, format.scale_max, format.per_head, bits)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _times_power_of_two(x, exponent):
    half = exponent >> 1
    return x * _power_of_two(half) * _power_of_two(exponent - half)


@triton.jit
def _exponent_of(x):
    return tl.maximum((_bits(x) >> 23) & 0xFF, 1) - 127


@triton.jit
def _round_to_quantum(x, quantum, noise, NOISE_BITS: tl.constexpr):
    """|x| as a multiple of 2**quantum, int32: nearest even when NOISE_BITS is 0, else stochastic."""
    bits = _bits(x)
    field = (bits >> 23) & 0xFF
    sig = (bits & 0x7FFFFF) | tl.where(field > 0, 1 << 23, 0)
    shift = quantum - (tl.maximum(field, 1) - 150)
    if NOISE_BITS == 0:
        shift = tl.minimum(shift, 25)
        rounded = sig + (1 << tl.maximum(shift - 1, 0)) - 1 + ((sig >> tl.maximum(shift, 0)) & 1)
        multiple = tl.where(shift > 0, rounded >> tl.maximum(shift, 0), sig)
    else:
        # 32-bit words: fraction = floor(δ·2³²); its sum with the noise carries exactly when the value rounds up.
        small = shift < 32
        wide = sig.to(tl.uint32)
        above = wide << tl.where(small, 32 - shift, 0).to(tl.uint32)
        below = wide >> tl.minimum(tl.maximum(shift - 32, 0), 31).to(tl.uint32)
        fraction = tl.where(small, above, below)
        whole = tl.where(small, sig >> tl.minimum(shift, 31), 0)
        if NOISE_BITS == 32:
            up = (fraction + noise) < fraction
        else:
            up = (fraction >> (32 - NOISE_BITS)) + (noise >> (32 - NOISE_BITS)) >= (1 << NOISE_BITS)
        multiple = whole + up.to(tl.int32)
    return multiple


@triton.jit
def _with_sign(value, x):
    signed = ((_bits(value) & 0x7FFFFFFF) | (_bits(x) & -2147483648)).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, signed)


@triton.jit
def _round_elements(
    x, noise, INTEGER: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr, MAX: tl.constexpr, NOISE_BITS: tl.constexpr
):
    clamped = tl.minimum(tl.maximum(x, -MAX), MAX)
    if INTEGER:
        quantum = tl.zeros_like(_bits(x))
    else:
        quantum = tl.maximum(_exponent_of(clamped), LEAST) - MANTISSA
    multiple = _round_to_quantum(clamped, quantum, noise, NOISE_BITS).to(tl.float32)
    return _with_sign(_times_power_of_two(multiple, quantum), x)


@triton.jit
def _round_elements_scaled(
    x, noise, scale_exponent, MANTISSA: tl.constexpr, LEAST: tl.constexpr, MAX: tl.constexpr, NOISE_BITS: tl.constexpr
):
    """Elements of a grid times 2**scale_exponent (MX)."""
    largest = _times_power_of_two(tl.zeros_like(x) + MAX, scale_exponent)
    clamped = tl.minimum(tl.maximum(x, -largest), largest)
    tiny = tl.abs(x) < 7.888609052210118e-31  # 2⁻¹⁰⁰: below fp32's normal range the exponent bits stop telling the exponent
    exponent = tl.where(tiny, _exponent_of(clamped * 16777216.0) - 24, _exponent_of(clamped))
    quantum = tl.maximum(exponent, scale_exponent + LEAST) - MANTISSA
    multiple = _round_to_quantum(clamped, quantum, noise, NOISE_BITS).to(tl.float32)
    return _with_sign(_times_power_of_two(multiple, quantum), x)


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
def _nvfp4_at(x, wanted, decode, noise, MAX: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr, NOISE_BITS: tl.constexpr):
    # The block scale is E4M3, to nearest.
    scale = _round_elements(wanted, wanted.to(tl.uint32, bitcast=True), False, 3, -6, 448.0, 0) * decode
    inverse = tl.minimum(tl.div_rn(tl.zeros_like(scale) + 1.0, scale), _FLT_MAX)
    return _round_elements(x * inverse, noise, False, MANTISSA, LEAST, MAX, NOISE_BITS) * scale


@triton.jit
def cast_tile(x, noise, CAST: tl.constexpr):
    """A head's state `[D_V, D_K]` (powers of two, zero outside the head) as it reads back; noise: uint32 words like x."""
    LOSSY: tl.constexpr = CAST[0]
    INTEGER: tl.constexpr = CAST[1]
    MANTISSA: tl.constexpr = CAST[2]
    LEAST: tl.constexpr = CAST[3]
    MAX: tl.constexpr = CAST[4]
    SCALE: tl.constexpr = CAST[6]
    NOISE_BITS: tl.constexpr = CAST[12]
    if not LOSSY:
        stored = x
    elif SCALE == NONE:
        stored = _round_elements(x, noise, INTEGER, MANTISSA, LEAST, MAX, NOISE_BITS)
    else:
        stored = _cast_blocks(x, noise, CAST)
    return stored


@triton.jit
def _cast_blocks(x, noise, CAST: tl.constexpr):
    """`cast_tile` of a format with scales."""
    INTEGER: tl.constexpr = CAST[1]
    MANTISSA: tl.constexpr = CAST[2]
    LEAST: tl.constexpr = CAST[3]
    MAX: tl.constexpr = CAST[4]
    LARGEST: tl.constexpr = CAST[5]
    SCALE: tl.constexpr = CAST[6]
    BLOCK: tl.constexpr = CAST[7]
    RULE: tl.constexpr = CAST[8]
    POWER: tl.constexpr = CAST[9]
    SCALE_MAX: tl.constexpr = CAST[10]
    PER_HEAD: tl.constexpr = CAST[11]
    NOISE_BITS: tl.constexpr = CAST[12]
    D_V: tl.constexpr = x.shape[0]
    D_K: tl.constexpr = x.shape[1]
    B: tl.constexpr = D_K if BLOCK == 0 or BLOCK > D_K else BLOCK
    blocks = tl.reshape(x, (D_V, D_K // B, B))
    words = tl.reshape(noise, (D_V, D_K // B, B))
    if SCALE == E8M0:
        amax = tl.max(tl.abs(blocks), axis=2, keep_dims=True)
        if RULE == FLOOR:
            shared = (_bits(amax) >> 23) - 127 - LARGEST
        elif RULE == EVEN:
            shared = ((_bits(amax) + (1 << (22 - MANTISSA))) >> 23) - 127 - LARGEST
        else:
            shared = ((_bits(tl.div_rn(amax, tl.zeros_like(amax) + MAX)) + 0x7FFFFF) >> 23) - 127
        shared = tl.minimum(tl.maximum(shared, -127), 127)
        stored = _round_elements_scaled(blocks, words, shared + tl.zeros_like(_bits(blocks)), MANTISSA, LEAST, MAX, NOISE_BITS)
        bad = tl.max(((_bits(blocks) & 0x7FFFFFFF) >= 0x7F800000).to(tl.int32), axis=2, keep_dims=True)
        stored = tl.where(bad > 0, float("nan"), stored)
    else:
        finite = tl.minimum(tl.maximum(blocks, -_FLT_MAX), _FLT_MAX)
        finite = tl.where(blocks != blocks, blocks, finite)
        amax = tl.max(tl.abs(finite), axis=2, keep_dims=True)
        # A maximum on the device may ignore NaN; in the reference a NaN scale makes all that it scales NaN.
        bad = tl.max((blocks != blocks).to(tl.int32), axis=2, keep_dims=True)
        if PER_HEAD or SCALE == NVFP4:
            bad = tl.zeros_like(bad) + tl.max(tl.max(bad, axis=2), axis=None)
        if SCALE == AMAX:
            if PER_HEAD:
                amax = tl.zeros_like(amax) + tl.max(tl.max(amax, axis=2), axis=None)
            scale = tl.div_rn(amax, tl.zeros_like(amax) + MAX)
            scale = tl.where(scale == 0.0, 1.0, scale)
            ratio = tl.div_rn(finite, scale + tl.zeros_like(finite))
            stored = _round_elements(ratio, words, INTEGER, MANTISSA, LEAST, MAX, NOISE_BITS) * scale
            stored = tl.where(stored != stored, stored, tl.minimum(tl.maximum(stored, -_FLT_MAX), _FLT_MAX))
        else:
            amax_head = tl.zeros_like(amax) + tl.max(tl.max(amax, axis=2), axis=None)
            encode = tl.minimum(tl.div_rn(tl.zeros_like(amax) + MAX * SCALE_MAX, amax_head), _FLT_MAX)
            encode = tl.where((amax_head == 0.0) | (encode == 0.0), 1.0, encode)
            decode = tl.div_rn(tl.zeros_like(amax) + 1.0, encode)
            wanted = amax * (encode * _ONE_SIXTH)
            stored = _nvfp4_at(finite, wanted, decode, words, MAX, MANTISSA, LEAST, NOISE_BITS)
            if POWER > 0:
                other = _nvfp4_at(finite, wanted * 1.5, decode, words, MAX, MANTISSA, LEAST, NOISE_BITS)
                error, other_error = tl.abs(stored - finite), tl.abs(other - finite)
                if POWER == 2:
                    error, other_error = error * error, other_error * other_error
                better = _halving_sum(other_error) < _halving_sum(error)
                stored = tl.where(tl.expand_dims(better, 2), other, stored)
        stored = tl.where(bad > 0, float("nan"), stored)
    return tl.reshape(stored, (D_V, D_K))


@triton.jit
def tile_noise(seed, position, layer_head_copy, document, quads, D_V: tl.constexpr, D_K: tl.constexpr):
    """uint32 words `[D_V, D_K]` of one head at one position; quads = ceil(d_k / 4). See `replayssm_emulation.state_noise`."""
    row = tl.arange(0, D_V)[:, None]
    quad = tl.arange(0, D_K // 4)[None, :]
    c0 = (row * quads + quad).to(tl.uint32)
    zero = c0 * 0
    a, b, c, d = tl.philox(seed, c0, zero + position.to(tl.uint32), zero + layer_head_copy.to(tl.uint32), zero + document.to(tl.uint32))
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
