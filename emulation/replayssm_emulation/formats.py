"""Number formats as data: element type, block, scale, saturation.

Element parameters follow OCP FP8 (e4m3, e5m2), OCP Microscaling v1.0 (e2m1, e2m3, e3m2; block 32, E8M0 scale), IEEE 754
(fp16) and bfloat16. NVFP4 is E2M1 in blocks of 16 with an E4M3 block scale and an fp32 second-level scale, as in
NVIDIA's Transformer Engine reference. All formats saturate at the largest finite value.
"""

from dataclasses import dataclass, replace

from .errors import UsageError


@dataclass(frozen=True)
class Minifloat:
    """Binary floating-point element: `mantissa` stored bits, exponent `bias`, largest finite value `max`."""

    name: str
    bits: int
    mantissa: int
    bias: int
    max: float

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; subnormals share it."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number (emax of the OCP MX specification)."""
        exponent = 0
        while 2.0 ** (exponent + 1) <= self.max:
            exponent += 1
        return exponent


@dataclass(frozen=True)
class Integer:
    """Symmetric signed integer element in [-max, max]."""

    name: str
    bits: int
    max: float


E4M3 = Minifloat("e4m3", 8, 3, 7, 448.0)
E5M2 = Minifloat("e5m2", 8, 2, 15, 57344.0)
E2M1 = Minifloat("e2m1", 4, 1, 1, 6.0)
E2M3 = Minifloat("e2m3", 6, 3, 1, 7.5)
E3M2 = Minifloat("e3m2", 6, 2, 3, 28.0)
FP16 = Minifloat("fp16", 16, 10, 15, 65504.0)
BF16 = Minifloat("bf16", 16, 7, 127, float.fromhex("0x1.fep127"))


@dataclass(frozen=True)
class Format:
    """How one copy of a state is stored.

    scale: "none" (elements alone), "amax" (fp32 scale = amax / element.max), "e8m0" (power of two, MX) or "nvfp4".
    block: elements along d_k that share a scale; None means the whole row of d_k. Ignored when `per_head`.
    per_head: one scale for the [d_v, d_k] state of a head.
    scale_rule: for e8m0, how the shared exponent follows from amax: "floor" (OCP), "even" or "rceil".
    four_over_six: for nvfp4, "" or the error ("mse", "mae") by which a block picks a scale that maps its amax to 4.
    scale_max: for nvfp4, the largest block scale that the second-level scale aims at.
    """

    name: str
    element: Minifloat | Integer | None
    summary: str
    scale: str = "none"
    block: int | None = None
    per_head: bool = False
    scale_rule: str = "floor"
    four_over_six: str = ""
    scale_max: float = 448.0

    def bits_per_element(self, d_v: int, d_k: int) -> float:
        """Stored bits per state element, scales included, for a head of [d_v, d_k]."""
        if self.element is None:
            return 32.0
        blocks = -(-d_k // (self.block or d_k)) * d_v
        scale_bits = {
            "none": 0,
            "amax": 32 * (1 if self.per_head else blocks),
            "e8m0": 8 * blocks,
            "nvfp4": 8 * blocks + 32,
        }
        return self.element.bits + scale_bits[self.scale] / (d_v * d_k)


def _named() -> dict[str, Format]:
    formats = [
        Format("fp32", None, "IEEE single precision: the reference, never rounded"),
        Format("bf16", BF16, "bfloat16, no scale"),
        Format("fp16", FP16, "IEEE half precision, no scale"),
        Format("fp8", E4M3, "E4M3, fp32 scale per row of d_k", "amax"),
        Format("fp8-e5m2", E5M2, "E5M2, fp32 scale per row of d_k", "amax"),
        Format("int16", Integer("int16", 16, 32767.0), "symmetric 16-bit integer, fp32 scale per row", "amax"),
        Format("int8", Integer("int8", 8, 127.0), "symmetric 8-bit integer, fp32 scale per row", "amax"),
        Format("int4", Integer("int4", 4, 7.0), "symmetric 4-bit integer, fp32 scale per row", "amax"),
        Format("mxfp8", E4M3, "OCP MXFP8 (E4M3), block 32, E8M0 scale", "e8m0", 32),
        Format("mxfp8-e5m2", E5M2, "OCP MXFP8 (E5M2), block 32, E8M0 scale", "e8m0", 32),
        Format("mxfp6", E2M3, "OCP MXFP6 (E2M3), block 32, E8M0 scale", "e8m0", 32),
        Format("mxfp6-e3m2", E3M2, "OCP MXFP6 (E3M2), block 32, E8M0 scale", "e8m0", 32),
        Format("mxfp4", E2M1, "OCP MXFP4 (E2M1), block 32, E8M0 scale", "e8m0", 32),
        Format("nvfp4", E2M1, "E2M1, block 16, E4M3 block scale, fp32 scale per head", "nvfp4", 16),
        Format(
            "nvfp4-4over6",
            E2M1,
            "nvfp4; a block may map its amax to 4 instead of 6",
            "nvfp4",
            16,
            four_over_six="mse",
            scale_max=256.0,
        ),
    ]
    return {f.name: f for f in formats}


FORMATS: dict[str, Format] = _named()


def get_format(name: str) -> Format:
    """The format called `name`.

    A format with fp32 scales also exists as `NAME-head` (one scale per head), `NAME-bN` (one per N elements of a row)
    and `NAME-unscaled` (a bare cast); an MX format as `NAME-even` and `NAME-rceil` (other scale rules).
    Raises UsageError for an unknown name.
    """
    if name in FORMATS:
        return FORMATS[name]
    base, _, variant = name.rpartition("-")
    found = FORMATS.get(base)
    if found and found.scale == "amax":
        kind = found.summary.split(",")[0]
        if variant == "head":
            return replace(found, name=name, per_head=True, summary=f"{kind}, fp32 scale per head")
        if variant == "unscaled" and isinstance(found.element, Minifloat):
            return replace(found, name=name, scale="none", summary=f"{kind}, bare cast without a scale")
        if variant[:1] == "b" and variant[1:].isascii() and variant[1:].isdigit() and variant[1] != "0":
            return replace(
                found,
                name=name,
                block=int(variant[1:]),
                summary=f"{kind}, fp32 scale per {variant[1:]} elements of a row",
            )
    if found and found.scale == "e8m0" and variant in ("even", "rceil"):
        return replace(found, name=name, scale_rule=variant, summary=f"{found.summary} ({variant} rule)")
    raise UsageError(f"unknown format {name!r}: use one of {', '.join(FORMATS)} (see `replayssm-eval formats`)")
