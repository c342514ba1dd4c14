"""Exact rounding of fp32 values to a coarser grid, by integer arithmetic on the bit pattern.

Every element format is a grid whose spacing ("quantum") is a power of two that depends on the value's exponent. Both
roundings work on sig, the 24-bit significand, and s, the number of its bits that lie below the quantum:

    nearest even   q = (sig + 2^(s-1) - 1 + lsb) >> s
    stochastic     q = floor(sig / 2^s) + [floor(δ·2ⁿ) + R >= 2ⁿ],  δ = fraction of sig / 2^s, R uniform in [0, 2ⁿ)

No floating-point operation rounds on the way, so the result is the same on every machine.
"""

import torch
from torch import Tensor

from .formats import Integer, Minifloat


def exponent_of(x: Tensor) -> Tensor:
    """floor(log2|x|) of fp32 `x` from its exponent bits, int32; subnormals and zero give -126."""
    field = (x.view(torch.int32) >> 23) & 0xFF
    return field.clamp_(min=1) - 127


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as fp32, for int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def times_power_of_two(x: Tensor, exponent: Tensor) -> Tensor:
    """x · 2**exponent, exact where fp32 can hold it, for int32 exponents in [-252, 254].

    In two factors: 2**exponent alone could leave the range of normal fp32 numbers.
    """
    half = exponent >> 1
    return x * power_of_two(half) * power_of_two(exponent - half)


def round_to_quantum(x: Tensor, quantum: Tensor, noise: Tensor | None, noise_bits: int = 32) -> Tensor:
    """|x| rounded to a multiple of 2**quantum.

    x: fp32. quantum: int32 exponent of the spacing, of x's shape, not below the spacing of x's own significand.
    noise: None rounds to nearest even; int64 words in [0, 2³²) round stochastically, of which the upper `noise_bits`
    are used. Returns the non-negative int64 multiple. Infinite and NaN inputs give garbage: mask them outside.
    """
    bits = x.view(torch.int32)
    field = (bits >> 23) & 0xFF
    sig = (bits & 0x7FFFFF) | ((field > 0).to(torch.int32) << 23)
    shift = quantum - (field.clamp_(min=1) - 150)  # 150 = bias 127 + 23 stored significand bits
    if noise is None:
        # Past 25 bits everything is below half a quantum.
        shift = shift.clamp_(max=25)
        rounded = sig + (1 << (shift - 1).clamp_(min=0)) - 1 + ((sig >> shift) & 1)
        # A shift of zero (value already on the grid) must not add the half.
        return torch.where(shift > 0, rounded >> shift, sig).to(torch.int64)
    wide = (sig.to(torch.int64) << noise_bits) >> shift.clamp_(max=63)
    return (wide + (noise >> (32 - noise_bits))) >> noise_bits


def round_elements(
    x: Tensor,
    element: Minifloat | Integer,
    noise: Tensor | None = None,
    noise_bits: int = 32,
    scale_exponent: Tensor | None = None,
) -> Tensor:
    """fp32 `x` rounded to `element`'s grid times 2**scale_exponent, saturated; returns fp32 of the same shape.

    noise, noise_bits: see `round_to_quantum`. scale_exponent: int32, broadcastable to x (the E8M0 scale of MX formats),
    None for 0. ±inf saturates, NaN stays NaN, the sign of zero is kept.
    """
    # The largest value lies on the grid, so clamping first saturates without changing any other result.
    if scale_exponent is None:
        clamped = x.clamp(-element.max, element.max)
    else:
        largest = times_power_of_two(torch.full_like(scale_exponent, element.max, dtype=torch.float32), scale_exponent)
        clamped = torch.minimum(torch.maximum(x, -largest), largest)
    if isinstance(element, Integer):
        quantum = torch.zeros_like(clamped, dtype=torch.int32)
    elif scale_exponent is None:
        quantum = exponent_of(clamped).clamp_(min=element.min_exponent) - element.mantissa
    else:
        # An E8M0 scale reaches below fp32's normal range, where the exponent bits stop telling the exponent.
        exponent = torch.where(x.abs() < 2.0**-100, exponent_of(clamped * 2.0**24) - 24, exponent_of(clamped))
        quantum = torch.maximum(exponent, scale_exponent + element.min_exponent) - element.mantissa
    multiple = round_to_quantum(clamped, quantum, noise, noise_bits).to(torch.float32)
    value = torch.copysign(times_power_of_two(multiple, quantum), x)
    return torch.where(torch.isnan(x), x, value)
