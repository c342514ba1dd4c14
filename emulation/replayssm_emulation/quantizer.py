"""Store-and-load through a low-precision format: what a state element reads as after it was written."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import UsageError
from .formats import E4M3, Format, Minifloat, get_format
from .philox import RECURRENCE, state_noise
from .rounding import round_elements

_FLT_MAX = torch.finfo(torch.float32).max
_ONE_SIXTH = torch.tensor(1 / 6, dtype=torch.float32).item()  # the fp32 reciprocal that hardware multiplies by


def quantize(
    x: Tensor,
    format: str | Format,
    rounding: str = "nearest",
    *,
    seed: int = 0,
    document: int = 0,
    layer: int = 0,
    position: int = 0,
    copy: int = RECURRENCE,
    noise_bits: int = 32,
) -> Tensor:
    """`x` as it reads back after being stored in `format`.

    x: fp32 `[..., d_k]`; blocks run along the last axis, the last two axes `[d_v, d_k]` are one head (a 1-D x is a head
    of one row), and the axis before them numbers the heads.
    rounding: "nearest" (ties to even) or "stochastic". Block scales are always rounded to nearest.
    seed, document, layer, position, copy: the key of the stochastic noise, together with the head's index and the
    element's place (see `state_noise`); rows of leading axes share it. The same key gives the same noise.
    noise_bits: random bits per element, 1..32 (13 for fp16 mimics the hardware's cvt.rs.f16x2).
    Returns a new fp32 tensor of x's shape. Raises UsageError for an unknown format or rounding or another dtype.
    """
    if isinstance(format, str):
        format = get_format(format)
    if rounding not in ("nearest", "stochastic"):
        raise UsageError(f"unknown rounding {rounding!r}: use 'nearest' or 'stochastic'")
    if x.dtype != torch.float32:
        raise UsageError(f"quantize takes float32, not {x.dtype}")
    if not 1 <= noise_bits <= 32:
        raise UsageError(f"noise_bits is {noise_bits}: use 1 to 32")
    noise = None
    if rounding == "stochastic" and x.numel():
        shape = (1,) * max(0, 3 - x.ndim) + tuple(x.shape)
        where = torch.tensor([position], device=x.device)
        heads, d_v, d_k = shape[-3:]
        noise = state_noise(
            seed, document=document, layer=layer, heads=heads, copy=copy, positions=where, d_v=d_v, d_k=d_k
        )
        noise = noise.view(shape[-min(3, x.ndim) :] if x.ndim < 3 else (heads, d_v, d_k))
    return quantize_with_noise(x, format, noise, noise_bits)


def quantize_with_noise(x: Tensor, format: Format, noise: Tensor | None, noise_bits: int = 32) -> Tensor:
    """`quantize` with the noise words given: int64 in [0, 2³²), broadcastable to x, or None for nearest even."""
    if format.element is None or x.numel() == 0:
        return x.clone()
    if format.scale == "none":
        return round_elements(x, format.element, noise, noise_bits)
    d_k = x.shape[-1]
    block = format.block or d_k
    if format.scale == "amax":
        block = min(block, d_k)
    pad = -d_k % block
    if pad:
        # Zeros change no amax, and what they round to is cut off again.
        x = F.pad(x, (0, pad))
        noise = None if noise is None else F.pad(noise, (0, pad))
    blocks = x.unflatten(-1, (-1, block))
    block_noise = None if noise is None else noise.unflatten(-1, (-1, block))
    stored = {"amax": _amax_scaled, "e8m0": _mx, "nvfp4": _nvfp4}[format.scale](blocks, format, block_noise, noise_bits)
    return stored.flatten(-2)[..., :d_k]


def _divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """IEEE fp32 quotient. With a plain number on either side torch multiplies by a reciprocal instead (which side, and
    where, depends on the device), and that rounds twice."""
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    return torch.div(*(x if isinstance(x, Tensor) else torch.full_like(like, x) for x in (a, b)))


def _over_head(blocks: Tensor) -> Tensor:
    """|max| over the [d_v, blocks, block] axes of one head, kept for broadcasting."""
    return blocks.abs().amax(dim=tuple(range(-min(3, blocks.ndim), 0)), keepdim=True)


def _amax_scaled(blocks: Tensor, format: Format, noise: Tensor | None, noise_bits: int) -> Tensor:
    """scale = amax / element.max, both divisions IEEE fp32."""
    element = format.element
    assert element is not None
    finite = blocks.clamp(-_FLT_MAX, _FLT_MAX)
    amax = _over_head(finite) if format.per_head else finite.abs().amax(dim=-1, keepdim=True)
    scale = _divide(amax, element.max)
    scale = torch.where(scale == 0, 1.0, scale)
    # A quotient may exceed the largest code by an ulp and dequantise past fp32's range.
    return (round_elements(finite / scale, element, noise, noise_bits) * scale).clamp_(-_FLT_MAX, _FLT_MAX)


def _mx(blocks: Tensor, format: Format, noise: Tensor | None, noise_bits: int) -> Tensor:
    """OCP Microscaling v1.0, section 6.3: a shared power-of-two scale; a non-finite element makes its block NaN."""
    element = format.element
    assert isinstance(element, Minifloat)
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    if format.scale_rule == "floor":
        shared = (amax.view(torch.int32) >> 23) - 127 - element.max_exponent
    elif format.scale_rule == "even":  # amax rounded to the element's precision before its exponent is taken
        shared = ((amax.view(torch.int32) + (1 << (22 - element.mantissa))) >> 23) - 127 - element.max_exponent
    else:  # rceil: the smallest power of two that keeps amax / scale within the element's range
        shared = ((_divide(amax, element.max).view(torch.int32) + 0x7FFFFF) >> 23) - 127
    shared = shared.clamp_(-127, 127)
    stored = round_elements(blocks, element, noise, noise_bits, scale_exponent=shared)
    return torch.where(torch.isfinite(amax), stored, torch.nan)


def _nvfp4(blocks: Tensor, format: Format, noise: Tensor | None, noise_bits: int) -> Tensor:
    """Two-level scaling as in NVIDIA's Transformer Engine reference; a block scale that underflows zeroes its block."""
    element = format.element
    assert isinstance(element, Minifloat)
    finite = blocks.clamp(-_FLT_MAX, _FLT_MAX)
    amax_head = _over_head(finite)
    encode = _divide(element.max * format.scale_max, amax_head).clamp(max=_FLT_MAX)
    encode = torch.where((amax_head == 0) | (encode == 0), 1.0, encode)
    decode = _divide(1.0, encode)
    wanted = finite.abs().amax(dim=-1, keepdim=True) * (encode * _ONE_SIXTH)

    def stored(wanted_scale: Tensor) -> Tensor:
        scale = round_elements(wanted_scale, E4M3) * decode
        inverse = _divide(1.0, scale).clamp(max=_FLT_MAX)
        return round_elements(finite * inverse, element, noise, noise_bits) * scale

    to_six = stored(wanted)
    if not format.four_over_six:
        return to_six
    to_four = stored(wanted * 1.5)
    power = 2 if format.four_over_six == "mse" else 1
    error_six, error_four = (_halving_sum((y - finite).abs() ** power) for y in (to_six, to_four))
    return torch.where(error_four < error_six, to_four, to_six)


def _halving_sum(x: Tensor) -> Tensor:
    """Sum over the last axis, a power of two, pairing halves: one fixed order, so that equal bits decide equally."""
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x


def counts(x: Tensor, stored: Tensor) -> dict[str, int]:
    """What a cast lost: `nan`, `inf` (saturated) and `flushed` (non-zero values that read back as zero)."""
    return {
        "nan": int(torch.isnan(x).sum()),
        "inf": int(torch.isinf(x).sum()),
        "flushed": int(((x != 0) & (stored == 0)).sum()),
    }
