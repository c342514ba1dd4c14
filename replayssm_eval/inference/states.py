"""The states of all state layers while a sequence runs: kept here, outside of the transformers cache.

In the place of a state, the cache carries a token: fp32 `[R, 2]` with the sequence's serial number and its length so
far. The serial number tells a cache of another sequence, and the length tells a cache that has missed or repeated a
chunk.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from replayssm_kernels import Carry, Group
from torch import Tensor

_GROUP_TENSORS = ("recurrence", "read", "changed", "zeroed", "k", "v", "beta", "log_decay")


class Snapshot(NamedTuple):
    """What one scan replaces in a layer's carry when it folds nothing."""

    position: int
    records: list[tuple[Tensor, ...]]
    flushes: list[int]


class States:
    """The carry of every state layer, with the serial number of its sequence."""

    def __init__(self) -> None:
        self._carries: dict[int, Carry] = {}
        self._serials: dict[int, int] = {}
        self._newest_serial = 0

    @property
    def layers(self) -> list[int]:
        """State layers that have seen a token."""
        return list(self._carries)

    @property
    def tokens(self) -> int:
        """Tokens that every state has seen."""
        return min((carry.position for carry in self._carries.values()), default=0)

    def by_row(self, attribute: str) -> dict[int, list[Any]]:
        """A fact of the rows by state layer: "flushes", "changed" or "zeroed", in the order of the batch."""
        return {layer: carry.by_row(attribute) for layer, carry in self._carries.items()}

    def groups(self, layer: int) -> list[Group]:
        """The groups of rows of a state layer; rows of one group fold at the same positions."""
        return self._carries[layer].groups

    # One scan

    def begin(self, layer: int) -> None:
        """A new sequence begins in this layer."""
        self._newest_serial += 1
        self._serials[layer] = self._newest_serial

    def carry(self, layer: int, token: Tensor) -> Carry | None:
        """What the layer carries, or None if `token`, which the cache holds, is not that of its last scan."""
        carry = self._carries.get(layer)
        if carry is None:
            return None
        if token.is_cuda and torch.cuda.is_current_stream_capturing():
            return carry  # while a CUDA graph is captured, no tensor has values to look at
        return carry if token[0].tolist() == [self._serials[layer], carry.position] else None

    def keep(self, layer: int, carry: Carry) -> None:
        """Replace what the layer carries."""
        self._carries[layer] = carry

    def first_token(self, layer: int, rows: int, device: torch.device) -> Tensor:
        """The token `[rows, 2]` of a sequence that has no length yet."""
        return torch.tensor([self._serials[layer], 0], dtype=torch.float32, device=device).repeat(rows, 1)

    # A whole sequence

    def clear(self) -> None:
        """Forget every state."""
        self._carries.clear()

    def reorder(self, rows: Sequence[int]) -> None:
        """Batch row i becomes what row rows[i] was; rows may be left out or repeated."""
        for carry in self._carries.values():
            carry.reorder(rows)

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON-able facts) from which `restore` makes the same states."""
        tensors: dict[str, Tensor] = {}
        layers = {}
        for layer, carry in self._carries.items():
            for g, group in enumerate(carry.groups):
                held = (group.recurrence, group.read, group.changed, group.zeroed, *group.records)
                for name, tensor in zip(_GROUP_TENSORS, held, strict=True):
                    tensors[f"state.{layer}.{g}.{name}"] = tensor
            groups = [{"rows": group.rows, "flushes": group.flushes} for group in carry.groups]
            layers[layer] = {"position": carry.position, "serial": self._serials[layer], "groups": groups}
        return tensors, {"layers": layers}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any], devices: dict[int, torch.device]) -> None:
        """Continue from an `export`, with the states of every layer on its device."""
        for key, saved in facts["layers"].items():
            layer = int(key)
            groups = []
            for g, group in enumerate(saved["groups"]):
                recurrence, read, changed, zeroed, *records = (
                    tensors[f"state.{layer}.{g}.{name}"].to(devices[layer]) for name in _GROUP_TENSORS
                )
                groups.append(Group(group["rows"], recurrence, read, tuple(records), changed, zeroed, group["flushes"]))
            self._carries[layer] = Carry(saved["position"], groups)
            self._serials[layer] = saved["serial"]
            self._newest_serial = max(self._newest_serial, saved["serial"])

    # Whole windows, for steps that are replayed

    def common_rows(self) -> list[int] | None:
        """The rows in the order in which every layer holds them, if all rows fold at the same positions; else None."""
        carries = list(self._carries.values())
        alike = all(len(carry.groups) == 1 and carry.groups[0].rows == carries[0].groups[0].rows for carry in carries)
        return carries[0].groups[0].rows if carries and alike else None

    def at_window_start(self) -> bool:
        """Whether no layer holds a record that waits for its fold."""
        return all(group.records[0].shape[1] == 0 for group in self._groups())

    def advance(self, windows: int, window: int) -> None:
        """Count `windows` windows of `window` tokens as seen and folded; a negative number rewinds.

        Only what Python counts changes: positions and flushes. The tensors are those of the last scan.
        """
        for carry in self._carries.values():
            carry.position += windows * window
        for group in self._groups():
            group.flushes += windows

    def set_lag(self, lag: Tensor | None) -> None:
        """What all layers take off a position to get the position of the noise (`Group.lag`)."""
        for group in self._groups():
            group.lag = lag

    def snapshot(self) -> list[Snapshot]:
        """What `put_back` needs after scans that computed nothing, as those of a capture."""
        return [
            Snapshot(carry.position, [g.records for g in carry.groups], [g.flushes for g in carry.groups])
            for carry in self._carries.values()
        ]

    def put_back(self, snapshots: list[Snapshot]) -> None:
        """Undo what the scans since `snapshot` have counted."""
        for carry, saved in zip(self._carries.values(), snapshots, strict=True):
            carry.position = saved.position
            for group, records, flushes in zip(carry.groups, saved.records, saved.flushes, strict=True):
                group.records, group.flushes = records, flushes

    def _groups(self) -> Iterable[Group]:
        return (group for carry in self._carries.values() for group in carry.groups)


def token_in_cache(cache: Any, layer: int) -> Tensor | None:
    """The token that the last scan of this layer left in the cache, None in a cache without one."""
    held = cache.layers[layer].recurrent_states if layer < len(cache.layers) else {}
    return held.get(0)


def lengthen(token: Tensor, tokens: int) -> None:
    """In place: the sequence is longer by this many tokens."""
    token[:, 1] += tokens


def tokens_in_cache(cache: Any, layer: int) -> int:
    """Tokens that a cache has seen, by the token of one state layer: an answer also without attention layers."""
    token = token_in_cache(cache, layer)
    return 0 if token is None else int(token[0, 1])
