"""How the copies of a group are cast: rows with equal casts are merged, and rows of one document share their noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from replayssm_emulation import state_noise
from replayssm_emulation.philox import RECURRENCE
from replayssm_emulation.scheme import Copy
from torch import Tensor

from ..state import BatchRow

_NOISE_ELEMENTS = 1 << 22  # drawn at once: bounds memory, changes no result


@dataclass(frozen=True)
class RowCast:
    """Consecutive rows of a group that are cast alike.

    seed: of their noise, None for nearest. which: RECURRENCE or READ.
    sources: (document, padding) of every row, or one pair if all rows agree: those share their noise.
    """

    where: slice
    copy: Copy
    noise_bits: int
    seed: int | None
    which: int
    sources: tuple[tuple[int, int], ...]


def plan_casts(rows: Sequence[BatchRow], which: int) -> list[RowCast]:
    """How a group's recurrence or read copies are cast, neighbours with one cast merged. Shared rows have no READ."""
    casts: list[RowCast] = []
    for index, row in enumerate(rows):
        copy = row.scheme.recurrence if which == RECURRENCE else row.scheme.read
        if copy is None or not copy.lossy:
            continue
        seed = row.seed if copy.rounding == "stochastic" else None
        cast = RowCast(
            slice(index, index + 1), copy, row.scheme.noise_bits, seed, which, ((row.document, row.padding),)
        )
        last = casts[-1] if casts else None
        if last and last.where.stop == index and replace(cast, where=last.where, sources=last.sources) == last:
            casts[-1] = replace(last, where=slice(last.where.start, index + 1), sources=last.sources + cast.sources)
        else:
            casts.append(cast)
    return [replace(cast, sources=cast.sources[:1]) if len(set(cast.sources)) == 1 else cast for cast in casts]


class FoldNoise:
    """Noise words of a group's folds; those of one document are drawn for several positions at a time."""

    def __init__(self, positions: Tensor, shape: tuple[int, int, int], layer: int):
        self.positions, self.shape, self.layer = positions, shape, layer
        heads, d_v, d_k = shape
        self.ahead = max(1, _NOISE_ELEMENTS // (heads * d_v * d_k))
        self.drawn: dict[tuple, tuple[int, Tensor]] = {}

    def words(self, cast: RowCast, index: int) -> Tensor | None:
        """int64 of the index-th fold: `[H, d_v, d_k]` for rows that share it, `[rows, H, d_v, d_k]` for others."""
        if cast.seed is None:
            return None
        documents, paddings = torch.tensor(cast.sources, device=self.positions.device).T
        if len(cast.sources) > 1:
            return self._draw(cast, documents, self.positions[index] - paddings)
        key = (cast.seed, cast.which, cast.sources)
        first, words = self.drawn.get(key, (-self.ahead, self.positions))
        if not first <= index < first + self.ahead:
            words = self._draw(cast, cast.sources[0][0], self.positions[index : index + self.ahead] - paddings)
            first, self.drawn[key] = index, (index, words)
        return words[index - first]

    def _draw(self, cast: RowCast, documents: int | Tensor, positions: Tensor) -> Tensor:
        assert cast.seed is not None
        heads, d_v, d_k = self.shape
        return state_noise(
            cast.seed,
            document=documents,
            layer=self.layer,
            heads=heads,
            copy=cast.which,
            positions=positions,
            d_v=d_v,
            d_k=d_k,
        )
