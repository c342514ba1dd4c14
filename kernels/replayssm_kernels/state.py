"""The state that a scan keeps between chunks of tokens: batch rows, groups of rows that fold together, the carry."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from replayssm_emulation import Scheme, UsageError, fixed_window
from replayssm_emulation.schedule import folds, segments
from torch import Tensor


@dataclass(frozen=True)
class BatchRow:
    """One batch row: a scheme, the seed and document of its noise, and the length of its prompt in tokens.

    padding: tokens before the text that only fill the batch; part of the prompt's length, not of the noise's positions.
    flushes: the schedule as positions; None follows the scheme's window from the end of the prompt.
    Raises UsageError for positions that do not increase or lie inside the prompt, for a seed or document that the noise
    key cannot hold, and for padding that is not shorter than the prompt.
    """

    scheme: Scheme
    seed: int = 0
    document: int = 0
    prompt: int = 0
    flushes: tuple[int, ...] | None = None
    padding: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.seed < 1 << 64 and 0 <= self.document < 1 << 32):
            raise UsageError(f"noise key out of range: seed {self.seed} (of 2^64), document {self.document} (of 2^32)")
        if self.padding and not 0 <= self.padding < self.prompt:
            raise UsageError(
                f"padding of {self.padding} tokens in a prompt of {self.prompt}: a sequence needs a token of its own"
            )
        if self.flushes:
            segments(list(self.flushes), self.prompt, self.flushes[-1] + 1)

    def folds(self, start: int, stop: int) -> tuple[tuple[int, bool], ...]:
        """(position, rounded) of every fold in [start, stop)."""
        if self.flushes is not None:
            flushes = list(self.flushes)
        else:
            first = self.prompt + max(0, start - self.prompt) // self.scheme.window * self.scheme.window
            flushes = fixed_window(self.scheme.window, first, stop)
        return tuple(folds(flushes, self.prompt, self.scheme.handover == "on", start, stop))


@dataclass
class Group:
    """Rows that fold at the same positions: their copies `[rows, H, d_v, d_k]` and the records since the last fold.

    records: k, v, beta and log_decay, each `[rows, pending, ...]`. flushes: rounded folds so far.
    changed `[rows, 2]`: number of checked folds whose cast changed the recurrence copy, and the read copy. The torch
    scan checks every fold, the Triton scan the newest of every chunk.
    zeroed `[rows]`: share of the non-zero elements that the newest read copy holds as zero.
    lag: int32 `[rows]` on the device, or None for each row's padding. The Triton scan subtracts it from a position to
    get the position of the noise. A replayed launch cannot get a new position, but it reads a new lag.
    """

    rows: list[int]
    recurrence: Tensor
    read: Tensor
    records: tuple[Tensor, ...]
    changed: Tensor
    zeroed: Tensor
    flushes: int = 0
    lag: Tensor | None = None


@dataclass
class Carry:
    """What a state layer keeps between chunks. position: tokens seen."""

    position: int = 0
    groups: list[Group] = field(default_factory=list)

    def reorder(self, rows: Sequence[int]) -> None:
        """Batch row i becomes what row rows[i] was; rows may be left out or repeated."""
        for group in self.groups:
            # By place in the group, so that rows that are cast alike stay neighbours.
            moved = sorted((group.rows.index(old), new) for new, old in enumerate(rows) if old in group.rows)
            group.rows = [new for _, new in moved]
            places = torch.tensor([place for place, _ in moved], dtype=torch.int64, device=group.read.device)
            group.recurrence, group.read, group.changed, group.zeroed = (
                x[places] for x in (group.recurrence, group.read, group.changed, group.zeroed)
            )
            group.records = tuple(x[places] for x in group.records)
        self.groups = [group for group in self.groups if group.rows]

    def by_row(self, attribute: str) -> list[Any]:
        """A per-row fact of the groups (flushes, changed, zeroed) in the order of the batch."""
        found = {}
        for group in self.groups:
            value = getattr(group, attribute)
            for place, row in enumerate(group.rows):
                found[row] = value if isinstance(value, int) else value[place].tolist()
        return [found[row] for row in sorted(found)]


def zero_carry(rows: Sequence[BatchRow], k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Carry:
    """Zero states. Rows share a group when they fold alike; inside one, rows that are cast alike are neighbours."""
    schedules: dict[tuple, list[int]] = {}
    for index, row in enumerate(rows):
        key = (
            row.scheme.window if row.flushes is None else row.flushes,
            row.prompt,
            row.scheme.handover if row.prompt else "",
        )
        schedules.setdefault(key, []).append(index)
    carry = Carry()
    for members in schedules.values():
        members.sort(key=lambda r: (str(rows[r].scheme), rows[r].seed, rows[r].document))
        heads, d_v = v.shape[2:]
        state = torch.zeros(len(members), heads, d_v, k.shape[3], device=v.device)
        empty = [x.new_zeros(len(members), 0, *x.shape[2:]) for x in (k, v, beta, log_decay)]
        changed = torch.zeros(len(members), 2, dtype=torch.int64, device=v.device)
        carry.groups.append(Group(members, state, state.clone(), tuple(empty), changed, state.new_zeros(len(members))))
    return carry
