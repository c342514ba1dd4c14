"""How a launch cuts a head's state into tiles: how many programs of how many warps.

Measured: reports/performance/notes.md.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
from replayssm_emulation import Scheme
from replayssm_emulation.scheme import Copy

from .cast import Cast, plan_cast, spans_head

_WIDEST = 256


class Specialisation(NamedTuple):
    """The facts of a scheme that a kernel is compiled for."""

    recurrence: Cast
    read: Cast
    shared: bool
    chained: bool
    reads_fold: bool

    @property
    def casts(self) -> tuple[Cast, Cast]:
        return self.recurrence, self.read

    @property
    def per_head(self) -> bool:
        """Whether a scale spans the whole head. `.fn`: called on the host, Triton 3.6 would pass a bare tuple."""
        return any(spans_head.fn(cast) for cast in self.casts)

    @property
    def noisy(self) -> bool:
        return any(cast.lossy and cast.noise_bits for cast in self.casts)

    @property
    def block(self) -> int:
        """Elements along d_k that must lie in one tile: 16, or the largest block of a scale."""
        return max(16, *(cast.block if cast.lossy else 0 for cast in self.casts))


def specialisation(scheme: Scheme, d_v: int, d_k: int) -> Specialisation | None:
    """The facts that a kernel is compiled for, or None when no kernel can run this scheme or head size."""

    def plan(copy: Copy) -> Cast | None:
        return plan_cast(copy.format, d_k, copy.rounding == "stochastic", scheme.noise_bits)

    recurrence = plan(scheme.recurrence)
    read = plan(scheme.read) if scheme.read is not None else Cast()
    if recurrence is None or read is None or max(d_v, d_k) > _WIDEST:
        return None
    return Specialisation(recurrence, read, scheme.read is None, scheme.cast == "chained", scheme.flush_reads == "fold")


@dataclass(frozen=True)
class Tiles:
    """How a head of `[d_v, d_k]` is cut: `parts` programs of `height` rows, each of `slices` tiles `width` wide."""

    height: int
    width: int
    slices: int
    parts: int
    warps: int
    by_column: bool = False
    registers: int | None = None  # a lower limit per thread lets more programs run at once
    stages: int = 1  # 2 reads a piece ahead; Triton 3.6 cannot compile that for windows of several pieces


def _cut(height: int, width: int, d_v: int, d_k: int, warps: int, **options: Any) -> Tiles:
    return Tiles(height, width, -(-d_k // width), -(-d_v // height), warps, **options)


def token_tiles(wanted: Specialisation, d_v: int, d_k: int) -> Tiles:
    """Tiles for single tokens. Noise bounds their speed; small programs keep Philox's first rounds in registers."""
    whole = max(wanted.block, triton.next_power_of_2(d_k))
    if not wanted.per_head:
        width = max(wanted.block, min(whole, 32))
        height = max(4, 128 // width)  # four elements a thread at least: none is held twice
        return _cut(height, width, d_v, d_k, 1, by_column=True)
    height = max(16, triton.next_power_of_2(d_v))
    width = max(wanted.block, min(whole, 32))
    return _cut(height, width, d_v, d_k, height // 16)


def window_tiles(wanted: Specialisation, d_v: int, d_k: int) -> Tiles:
    """Tiles for windows. One program per head only where a scale spans it; a warp for every band of 16 rows."""
    whole = max(wanted.block, triton.next_power_of_2(d_k))
    rows = max(16, triton.next_power_of_2(d_v))
    height = rows if wanted.per_head else 16 if wanted.noisy else min(rows, 32)
    width = max(wanted.block, min(whole, 128 if wanted.noisy and not wanted.per_head else 64))
    # A cast without noise waits for memory: read a piece ahead, more programs at once.
    registers, stages = (None, 1) if wanted.noisy or wanted.per_head else (168, 2)
    return _cut(height, width, d_v, d_k, height // 16, registers=registers, stages=stages)


def delta_tiles(wanted: Specialisation, d_v: int, d_k: int) -> Tiles:
    """Taller than those of the plain scan: every program of a head reads its keys and queries, wide ones in fp32."""
    rows = max(16, triton.next_power_of_2(d_v))
    height = rows if wanted.per_head else min(max(16, rows // 2), 64)
    width = max(wanted.block, min(triton.next_power_of_2(d_k), 64 if wanted.per_head else 32))
    return _cut(height, width, d_v, d_k, height // 16)
