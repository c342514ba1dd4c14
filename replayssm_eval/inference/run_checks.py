"""What is checked while a run goes: that every layer was scanned and rounded when due, and that outputs are finite."""

from collections.abc import Sequence

import torch
from replayssm_emulation import RunError
from replayssm_kernels import BatchRow
from torch import Tensor

from .states import States


def check_rounding(states: States, rows: Sequence[BatchRow], due: Sequence[int]) -> None:
    """Raises RunError unless every layer was rounded `due[row]` times, and every lossy copy really changed."""
    changed = states.by_row("changed")
    for layer, counted in states.by_row("flushes").items():
        if counted != list(due):
            raise RunError(
                f"state layer {layer} was rounded {counted} times at token {states.tokens}, where {list(due)} was due"
            )
        for row, changes in enumerate(changed[layer]):
            scheme = rows[row].scheme
            for copy, times in zip((scheme.recurrence, scheme.read), changes, strict=True):
                if copy is not None and copy.lossy and due[row] and not times:
                    raise RunError(
                        f"state layer {layer}: {due[row]} roundings to {copy.format.name} ({scheme}) changed nothing: "
                        "the emulation did not run"
                    )


def check_held_in_fp32(states: States, layer: int) -> None:
    """Raises RunError if a state is held in another dtype."""
    held = {tensor.dtype for group in states.groups(layer) for tensor in (group.recurrence, group.read)}
    if held != {torch.float32}:
        raise RunError(
            f"layer {layer}: the emulated state is held in {held}, not float32: the reference would be rounded too"
        )


class FiniteWatch:
    """Remembers of every layer in which rows its last output was finite, without waiting for the device."""

    def __init__(self) -> None:
        self._finite: dict[int, Tensor] = {}

    def note(self, layer: int, o: Tensor) -> None:
        """o: `[R, ...]`, the outputs of one scan."""
        self._finite[layer] = torch.isfinite(o.flatten(1).sum(1))  # one pass: anything not finite makes the sum so

    def first_nonfinite_layer(self, row: int) -> int | None:
        """The lowest layer whose last output was not finite in `row`."""
        return next((layer for layer, finite in sorted(self._finite.items()) if not finite[row]), None)

    def reorder(self, rows: Sequence[int]) -> None:
        """Batch row i becomes what row rows[i] was."""
        self._finite = {
            layer: finite[torch.tensor(rows, device=finite.device)] for layer, finite in self._finite.items()
        }

    def clear(self) -> None:
        self._finite.clear()


class PassWatch:
    """Knows which state layer is running, and counts scans: each layer scans exactly once per forward pass."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = list(layers)
        self._scanned: list[int] = []
        self._running: int | None = None

    @property
    def running(self) -> int:
        """The state layer that is running. Raises RunError between layers."""
        if self._running is None:
            raise RunError("a state layer ran outside its mixer: the hook that names the layer did not fire")
        return self._running

    def begin(self) -> None:
        """A forward pass begins. An earlier one may have been cut short by an error."""
        self._scanned = []

    def enter(self, layer: int) -> None:
        """The mixer of this layer begins."""
        self._running = layer

    def scanned(self) -> None:
        """The layer that is running has been scanned."""
        self._scanned.append(self.running)

    def end(self) -> None:
        """Raises RunError unless every state layer was scanned exactly once in this forward pass."""
        scanned, self._scanned, self._running = self._scanned, [], None
        if sorted(scanned) != self._layers:
            missing = sorted(set(self._layers) - set(scanned)) or scanned
            raise RunError(
                f"state hook did not run exactly once in layers {missing}: another kernel bypasses the recurrence "
                "functions"
            )
