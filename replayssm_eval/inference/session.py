"""Run schemes inside a Hugging Face model: one batch row per scheme, one set of copies per state layer."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

import torch
import transformers
from replayssm_emulation import Rule, RunError, Scheme, UsageError, parse_scheme
from replayssm_kernels import BatchRow, Carry, Group, choose_backend, replay_scan
from torch import Tensor
from transformers import Cache

from ..models.families import family_of
from .attention import without_dense_masks
from .equal_rows import row_by_row
from .forward import base_model
from .startup_checks import check_equal_rows, probe_session, probe_unpatched, rehearse

_GROUP_TENSORS = ("recurrence", "read", "changed", "zeroed", "k", "v", "beta", "log_decay")


class Session:
    """What `attach` yields: the rows, the state of every layer, and what was seen of both.

    rows: one `BatchRow` per batch row. layers: index of every state layer. tokens: tokens that the states have seen.
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
        self.follow_hf_clamp = follow_hf_clamp
        self.backend = backend
        self.rule = rule
        self.may_capture = True  # decoding steps as CUDA graphs, until a model turns out not to be able to
        self._carries: dict[int, Carry] = {}
        self._serials: dict[int, int] = {}
        self._next_serial = 0
        self._mixers = mixers
        self._layer: int | None = None
        self._scanned: list[int] = []
        self._finite: dict[int, Tensor] = {}
        self._inputs: dict[int, dict[str, Any]] = {}
        self._twins: dict[int, Carry] | None = None  # what the torch scan carries, while both are compared

    @property
    def mixer(self) -> Any:
        """The module of the state layer that is running."""
        return self._mixers[self._layer] if self._layer is not None else None

    @property
    def tokens(self) -> int:
        return min((c.position for c in self._carries.values()), default=0)

    @property
    def flushes(self) -> dict[int, list[int]]:
        """Rounded folds so far by state layer, per row, counted where they happened."""
        return {layer: carry.by_row("flushes") for layer, carry in self._carries.items()}

    def check_rounding(self, due: Sequence[int]) -> None:
        """Raises RunError unless every state layer was rounded `due[row]` times, and every lossy copy really changed."""
        for layer, counted in self.flushes.items():
            if counted != list(due):
                raise RunError(
                    f"state layer {layer} was rounded {counted} times at token {self.tokens}, where {list(due)} was due"
                )
            for row, changed in enumerate(self._carries[layer].by_row("changed")):
                scheme = self.rows[row].scheme
                for copy, times in zip((scheme.recurrence, scheme.read), changed, strict=True):
                    if copy is not None and copy.lossy and due[row] and not times:
                        raise RunError(
                            f"state layer {layer}: {due[row]} roundings to {copy.format.name} ({scheme}) changed nothing: the emulation did not run"
                        )

    def scan(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The recurrence of the layer that is running; shapes as in `replay_scan`.

        state: what the HF cache holds for this layer. None starts a sequence; otherwise it must be the token that the
        previous call returned. Returns (o, token): the states themselves stay here, the cache carries `[R, 2]` with
        the sequence's serial number and length.
        """
        layer = self._layer
        if layer is None:
            raise RunError("a state layer ran outside its mixer: the hook that names the layer did not fire")
        if len(v) != len(self.rows):
            raise UsageError(
                f"the model was called with batch {len(v)}, but {len(self.rows)} schemes are attached: give one row per scheme"
            )
        carry = None
        if state is None:
            self._serials[layer] = self._next_serial = self._next_serial + 1
        else:
            carry = self._carries.get(layer)
            if carry is None or not self._is_next(state, layer, carry):
                raise RunError(
                    f"layer {layer}: the cache belongs to another sequence than the attached state; start with a new cache"
                )
        self._inputs[layer] = {
            "heads": v.shape[2],
            "d_v": v.shape[3],
            "d_k": k.shape[3],
            "dtypes": (v.dtype, k.dtype, beta.dtype, log_decay.dtype),
        }
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, beta, log_decay)):
            raise UsageError(
                "schemes are emulated for inference only: call the model under torch.inference_mode() or torch.no_grad()"
            )
        o, carry = replay_scan(
            q, k, v, beta, log_decay, self.rows, carry, layer=layer, rule=self.rule, backend=self.backend
        )
        if self._twins is not None:
            twin = self._twins.get(layer)
            expected, self._twins[layer] = replay_scan(
                q, k, v, beta, log_decay, self.rows, twin, layer=layer, rule=self.rule
            )
            self._compare_scans(o, expected)
        held = {t.dtype for group in carry.groups for t in (group.recurrence, group.read)}
        if held != {torch.float32}:
            raise RunError(
                f"layer {layer}: the emulated state is held in {held}, not float32: the reference would be rounded too"
            )
        self._carries[layer] = carry
        self._scanned.append(layer)
        self._finite[layer] = torch.isfinite(o.flatten(1).sum(1))  # one pass: anything not finite makes the sum so
        if state is None:
            token = torch.tensor([self._serials[layer], 0], dtype=torch.float32, device=v.device).repeat(
                len(self.rows), 1
            )
        else:
            token = state.clone()
        token[:, 1] += v.shape[1]
        return o, token

    def _is_next(self, state: Tensor, layer: int, carry: Carry) -> bool:
        """Whether the cache holds the token of the last call. A CUDA graph that is being captured has no values to look at."""
        if state.is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        return state[0].tolist() == [self._serials[layer], carry.position]

    def _compare_scans(self, o: Tensor, expected: Tensor) -> None:
        """Raises RunError where the Triton scan is not the torch scan.

        Both round the same folds with the same noise. Their sums differ by fp32 roundoff, which may tip a state element over
        a rounding boundary and change the outputs that read it: at most a quarter of a lossy row, none of an exact one. A
        wrong kernel is wrong nearly everywhere.
        """
        for row, (a, b) in enumerate(zip(o, expected, strict=True)):
            scheme = self.rows[row].scheme
            off = (~((a - b).abs() <= 1e-4 * b.abs().max())).float().mean().item()
            lossy = any(copy is not None and copy.lossy for copy in (scheme.recurrence, scheme.read))
            if off > (0.25 if lossy else 0):
                raise RunError(
                    f"start-up check: state layer {self._layer}, {scheme}: {off:.1%} of the Triton scan's outputs differ from the torch "
                    "scan's; use --backend torch and report this"
                )

    def first_nonfinite_layer(self, row: int) -> int | None:
        """The lowest state layer whose last output was not finite in `row`."""
        return next((layer for layer in self.layers if layer in self._finite and not self._finite[layer][row]), None)

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

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Continue from an `export`; the rows must be those of then."""
        for key, saved in facts["layers"].items():
            layer = int(key)
            groups = []
            device = next(self._mixers[layer].parameters()).device
            for g, facts_of_group in enumerate(saved["groups"]):
                recurrence, read, changed, zeroed, *records = (
                    tensors[f"state.{layer}.{g}.{name}"].to(device) for name in _GROUP_TENSORS
                )
                groups.append(
                    Group(
                        facts_of_group["rows"],
                        recurrence,
                        read,
                        tuple(records),
                        changed,
                        zeroed,
                        facts_of_group["flushes"],
                    )
                )
            self._carries[layer] = Carry(saved["position"], groups)
            self._serials[layer] = saved["serial"]
            self._next_serial = max(self._next_serial, saved["serial"])

    def manifest(self, cache: Any = None) -> list[dict[str, Any]]:
        """Per state layer, read back from the live state: shape, copies, dtypes of state, records and conv state."""
        entries = []
        for layer in self.layers:
            if layer not in self._carries:
                continue
            seen = self._inputs[layer]
            state_dtypes = {
                str(t.dtype).removeprefix("torch.") for g in self._carries[layer].groups for t in (g.recurrence, g.read)
            }
            v, k, beta, decay = (str(d).removeprefix("torch.") for d in seen["dtypes"])
            entry = {
                "layer": layer,
                "heads": seen["heads"],
                "d_v": seen["d_v"],
                "d_k": seen["d_k"],
                "state_held_in": sorted(state_dtypes),
                "zeroed_share": [round(x, 6) for x in self._carries[layer].by_row("zeroed")],
                "records": {"v": v, "k": k, "beta": beta, "log_decay": decay},
            }
            layers = [] if cache is None else cache.layers
            conv = (
                layers[layer].conv_states[0] if layer < len(layers) and hasattr(layers[layer], "conv_states") else None
            )
            if conv is not None:
                entry["conv_state"] = str(conv.dtype).removeprefix("torch.")
            entries.append(entry)
        return entries

    def _begin_forward(self) -> None:
        self._scanned = []  # of a pass that an error cut short

    def _begin(self, layer: int) -> None:
        self._layer = layer

    def _end_of_forward(self) -> None:
        scanned, self._scanned, self._layer = self._scanned, [], None
        if sorted(scanned) != self.layers:
            missing = sorted(set(self.layers) - set(scanned)) or scanned
            raise RunError(
                f"state hook did not run exactly once in layers {missing}: another kernel bypasses the recurrence functions"
            )

    def reorder(self, rows: Sequence[int]) -> None:
        """Batch row i goes on as row rows[i] was; rows may be left out, or repeated (beams: their noise is then the same)."""
        self.rows = [self.rows[i] for i in rows]
        for carry in self._carries.values():
            carry.reorder(rows)
        self._finite = {
            layer: finite[torch.tensor(rows, device=finite.device)] for layer, finite in self._finite.items()
        }

    def start(self, rows: Sequence[BatchRow]) -> None:
        """Forget every state and go on with these rows: the next forward pass must begin a new sequence."""
        self.rows = list(rows)
        self._carries.clear()
        self._finite.clear()
        self._scanned = []


def state_layers(model: Any) -> dict[int, Any]:
    """Layer index -> mixer of every layer that holds a recurrent state. Raises UsageError when there is none."""
    config = model.config.get_text_config()
    family = family_of(config)
    found = {m.layer_idx: m for m in model.modules() if type(m).__name__ == family.mixer}
    if not found:
        raise UsageError(
            f"this {config.model_type} model has no state layer (no {family.mixer}): there is nothing to round"
        )
    declared = getattr(config, "layer_types", None)
    if declared is not None:
        expected = [i for i, kind in enumerate(declared) if kind in ("linear_attention", "hybrid")]
        if sorted(found) != expected:
            raise UsageError(f"state layers found at {sorted(found)}, but the config declares {expected}")
    return dict(sorted(found.items()))


def as_rows(
    schemes: Sequence[str | Scheme | BatchRow], seed: int = 0, document: int = 0, prompt: int = 0
) -> list[BatchRow]:
    """One `BatchRow` per scheme; a `BatchRow` passes through unchanged."""
    rows = []
    for scheme in schemes:
        if isinstance(scheme, str):
            scheme = parse_scheme(scheme)
        rows.append(scheme if isinstance(scheme, BatchRow) else BatchRow(scheme, seed, document, prompt))
    if not rows:
        raise UsageError("no scheme given: attach needs at least one row")
    return rows


@contextmanager
def attach(
    model: Any,
    schemes: Sequence[str | Scheme | BatchRow],
    *,
    seed: int = 0,
    document: int = 0,
    prompt: int = 0,
    follow_hf_clamp: bool = False,
    backend: str = "auto",
    probe: bool = True,
) -> Iterator[Session]:
    """Inside the block, batch row i of `model` keeps its recurrent state as `schemes[i]` says.

    model: a transformers model in eval mode; it must be called with batch = len(schemes), and a sequence lasts as long
    as the HF cache it is given. seed, document, prompt: applied to schemes that are not `BatchRow`s already.
    follow_hf_clamp: clamp Mamba-2's Δ as the many-token path of transformers does (decoding does not clamp).
    backend: of the scan, see `replayssm_kernels.choose_backend`.
    probe: first check that one pass, two chunks and single tokens agree, and that the unpatched model does too; with the
    Triton scan also compile it for these rows, and check it against the torch scan.
    Everything is put back on exit, also after an error.
    Raises UsageError for a model that cannot be emulated, RunError when the probe or a hook fails.
    """
    rows = as_rows(schemes, seed, document, prompt)
    if not hasattr(model, "config"):
        raise UsageError(
            f"attach takes a transformers model, not {type(model).__name__} (of what `load` returns, pass .model)"
        )
    mixers = state_layers(model)
    family = family_of(model.config.get_text_config())
    for row in rows:
        if row.scheme.fold != "exact" and not family.rule.delta:
            raise UsageError(
                f"scheme {row.scheme}: +fold={row.scheme.fold} is a choice of delta-rule models; {model.config.model_type} has none"
            )
    module = importlib.import_module(family.modeling)
    if model.training:
        raise UsageError(
            "the model is in training mode, where other functions compute the state: call model.eval() first"
        )
    if getattr(module, "_replayssm_session", None) is not None:
        raise UsageError(f"another session is attached to {family.modeling}: leave it first")
    chosen = choose_backend(backend, model.device, [row.scheme for row in rows])
    session = Session(rows, mixers, follow_hf_clamp, chosen, family.rule)
    unpatched = probe_unpatched(model) if probe else None  # before the functions are replaced
    with ExitStack() as stack:
        stack.enter_context(without_dense_masks(model))
        if len(set(rows)) < len(rows) and model.device.type == "cpu":  # a control
            for owner, name, by_row in row_by_row(len(rows)):
                _set_until_exit(stack, owner, name, by_row)
        for path, function in {**family.patches(session), "_replayssm_session": session}.items():
            *owners, name = path.split(".")
            _set_until_exit(stack, reduce(getattr, owners, module), name, function)
        if _without_attention(model):
            # Such a class fails to size a mask that no layer reads, and `generate` to ask its cache for a length.
            _set_until_exit(stack, module, "create_causal_mask", lambda *args, **kwargs: None)
            _set_until_exit(
                stack, Cache, "get_seq_length", lambda cache, layer_idx=0: _tokens_of(cache, session.layers[-1])
            )
        _set_until_exit(stack, Cache, "reorder_cache", _reorder_with(session, Cache.reorder_cache))
        for layer, mixer in mixers.items():
            hook = mixer.register_forward_pre_hook(lambda *_, layer=layer: session._begin(layer))
            stack.callback(hook.remove)
        stack.callback(base_model(model).register_forward_pre_hook(lambda *_: session._begin_forward()).remove)
        stack.callback(base_model(model).register_forward_hook(lambda *_: session._end_of_forward()).remove)
        if unpatched is not None:
            probe_session(model, session, unpatched)
            check_equal_rows(model, session, rows)
            session.start(rows)
            if session.backend == "triton":
                rehearse(model, session)
                session.start(rows)
        yield session


def _set_until_exit(stack: ExitStack, module: Any, name: str, value: Any) -> None:
    if hasattr(module, name):
        stack.callback(setattr, module, name, getattr(module, name))
    elif name.startswith("_replayssm"):
        stack.callback(delattr, module, name)
    else:
        raise RunError(
            f"{module.__name__} of transformers {transformers.__version__} has no {name}: this version is not supported"
        )
    setattr(module, name, value)


def _reorder_with(session: Session, original: Any) -> Any:
    """`Cache.reorder_cache`, which also moves the states that live outside of the cache."""

    def reorder_cache(cache: Any, beam_idx: Tensor) -> None:
        original(cache, beam_idx)
        session.reorder(beam_idx.tolist())

    return reorder_cache


def _tokens_of(cache: Any, layer: int) -> int:
    """Tokens that a cache without attention layers has seen, by the token that `Session.scan` left in a state layer's place."""
    held = cache.layers[layer].recurrent_states if layer < len(cache.layers) else {}
    return 0 if 0 not in held or held[0] is None else int(held[0][0, 1])


def _without_attention(model: Any) -> bool:
    """Whether a hybrid class was built without its attention layers."""
    kinds = getattr(model.config, "layer_types", None)
    return model.config.model_type == "nemotron_h" and kinds is not None and "full_attention" not in kinds
