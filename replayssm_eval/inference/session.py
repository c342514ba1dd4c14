"""What `attach` yields: one batch row per scheme, and the states of every layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from replayssm_emulation import Rule, RunError, UsageError
from replayssm_kernels import BatchRow, replay_scan
from torch import Tensor

from .run_checks import FiniteWatch, PassWatch, check_held_in_fp32, check_rounding
from .states import States, lengthen


class ScanInputs(NamedTuple):
    """What a state layer hands to its scan; shapes as in `replay_scan`."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor


class _InputFacts(NamedTuple):
    """Sizes and dtypes of a layer's inputs, for the manifest."""

    heads: int
    d_v: int
    d_k: int
    dtypes: dict[str, torch.dtype]


#: observer(layer, inputs, o). The layer goes on to work in o: copy what must be kept.
Observer = Callable[[int, ScanInputs, Tensor], None]


class Session:
    """The rows, and the states of every layer.

    rows: one `BatchRow` per batch row. layers: index of every state layer. states: what these layers carry.
    follow_hf_clamp: whether Δ is clamped as the many-token path of transformers does. rule: how a layer updates its
    state. backend: of the scan. may_capture: decoding steps become CUDA graphs, until a model turns out not to allow
    it. graphs_captured: CUDA graphs of decoding steps so far. watch: told by the hooks of `attach` which layer is
    running.
    """

    def __init__(
        self,
        rows: Sequence[BatchRow],
        mixers: dict[int, Any],
        follow_hf_clamp: bool = False,
        backend: str = "torch",
        rule: Rule = Rule.PLAIN,
    ):
        self.rows = list(rows)
        self.layers = list(mixers)
        self.states = States()
        self.follow_hf_clamp = follow_hf_clamp
        self.backend = backend
        self.rule = rule
        self.may_capture = True
        self.graphs_captured = 0
        self.watch = PassWatch(self.layers)
        self._mixers = mixers
        self._finite = FiniteWatch()
        self._inputs: dict[int, _InputFacts] = {}
        self._observers: list[Observer] = []

    @property
    def mixer(self) -> Any:
        """The module of the state layer that is running."""
        return self._mixers[self.watch.running]

    @property
    def tokens(self) -> int:
        """Tokens that the states have seen."""
        return self.states.tokens

    @property
    def flushes(self) -> dict[int, list[int]]:
        """Rounded folds so far by state layer, per row, counted where they happened."""
        return self.states.by_row("flushes")

    def scan(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The recurrence of the layer that is running; shapes as in `replay_scan`.

        state: what the HF cache holds for this layer. None starts a sequence; otherwise it must be the token that the
        previous call returned. Returns (o, token): the states themselves stay here, and the cache carries the token
        (see `states`). Raises UsageError for a wrong batch or a gradient, RunError for a cache of another sequence.
        """
        layer = self.watch.running
        if len(v) != len(self.rows):
            raise UsageError(
                f"the model was called with batch {len(v)}, but {len(self.rows)} schemes are attached: "
                "give one row per scheme"
            )
        carry = None
        if state is None:
            self.states.begin(layer)
        else:
            carry = self.states.carry(layer, state)
            if carry is None:
                raise RunError(
                    f"layer {layer}: the cache belongs to another sequence than the attached state; "
                    "start with a new cache"
                )
        inputs = ScanInputs(q, k, v, beta, log_decay)
        self._inputs[layer] = _facts(inputs)
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            raise UsageError(
                "schemes are emulated for inference only: call the model under torch.inference_mode() or "
                "torch.no_grad()"
            )
        o, carry = replay_scan(*inputs, self.rows, carry, layer=layer, rule=self.rule, backend=self.backend)
        for observer in self._observers:
            observer(layer, inputs, o)
        self.states.keep(layer, carry)
        check_held_in_fp32(self.states, layer)
        self.watch.scanned()
        self._finite.note(layer, o)
        token = self.states.first_token(layer, len(v), v.device) if state is None else state.clone()
        lengthen(token, v.shape[1])
        return o, token

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Inside the block, `observer` is called after every scan with what the layer gave and got."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def check_rounding(self, due: Sequence[int]) -> None:
        """Raises RunError unless every layer was rounded `due[row]` times, and every lossy copy really changed."""
        check_rounding(self.states, self.rows, due)

    def first_nonfinite_layer(self, row: int) -> int | None:
        """The lowest state layer whose last output was not finite in `row`."""
        return self._finite.first_nonfinite_layer(row)

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON-able facts) from which `restore` makes the same states."""
        return self.states.export()

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Continue from an `export`; the rows must be the same as then."""
        devices = {layer: next(mixer.parameters()).device for layer, mixer in self._mixers.items()}
        self.states.restore(tensors, facts, devices)

    def manifest(self, cache: Any = None) -> list[dict[str, Any]]:
        """Per state layer, read back from the live state: shape, dtypes of state, records and conv state."""
        entries = []
        zeroed = self.states.by_row("zeroed")
        for layer in self.layers:
            if layer not in zeroed:
                continue
            inputs = self._inputs[layer]
            held = {_name(x.dtype) for group in self.states.groups(layer) for x in (group.recurrence, group.read)}
            entry = {
                "layer": layer,
                "heads": inputs.heads,
                "d_v": inputs.d_v,
                "d_k": inputs.d_k,
                "state_held_in": sorted(held),
                "zeroed_share": [round(x, 6) for x in zeroed[layer]],
                "records": {name: _name(dtype) for name, dtype in inputs.dtypes.items()},
            }
            layers = [] if cache is None else cache.layers
            if layer < len(layers) and hasattr(layers[layer], "conv_states"):
                conv = layers[layer].conv_states[0]
                if conv is not None:
                    entry["conv_state"] = _name(conv.dtype)
            entries.append(entry)
        return entries

    def reorder(self, rows: Sequence[int]) -> None:
        """Batch row i goes on as row rows[i] was. Rows may be left out, or repeated: beams then share their noise."""
        self.rows = [self.rows[i] for i in rows]
        self.states.reorder(rows)
        self._finite.reorder(rows)

    def start(self, rows: Sequence[BatchRow]) -> None:
        """Forget every state and go on with these rows: the next forward pass must begin a new sequence."""
        self.rows = list(rows)
        self.states.clear()
        self._finite.clear()
        self.watch.begin()


def _facts(inputs: ScanInputs) -> _InputFacts:
    dtypes = {
        "v": inputs.v.dtype,
        "k": inputs.k.dtype,
        "beta": inputs.beta.dtype,
        "log_decay": inputs.log_decay.dtype,
    }
    return _InputFacts(inputs.v.shape[2], inputs.v.shape[3], inputs.k.shape[3], dtypes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
