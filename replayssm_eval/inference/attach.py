"""Put schemes inside a Hugging Face model: its recurrence functions are replaced, and put back on exit."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from types import ModuleType
from typing import Any

import transformers
from replayssm_emulation import RunError, Scheme, UsageError, parse_scheme
from replayssm_kernels import BatchRow, choose_backend
from torch import Tensor
from transformers import Cache

from ..models.families import Family, family_of, state_layers
from .attention import without_dense_masks
from .equal_rows import row_by_row
from .forward import base_model
from .session import Session
from .startup_checks import check_equal_rows, probe_session, probe_unpatched, rehearse
from .states import tokens_in_cache

__all__ = ["as_rows", "attach", "state_layers"]

_SESSION = "_replayssm_session"  # what marks a modeling module as taken


def as_rows(
    schemes: Sequence[str | Scheme | BatchRow], seed: int = 0, document: int = 0, prompt: int = 0
) -> list[BatchRow]:
    """One `BatchRow` per scheme; a `BatchRow` passes through unchanged. Raises UsageError without a scheme."""
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

    model: a transformers model in eval mode. Call it with batch = len(schemes). A sequence lasts as long as the HF
    cache that the model is given. seed, document, prompt: for the schemes that are not `BatchRow`s already.
    follow_hf_clamp: clamp Mamba-2's Δ as the many-token path of transformers does (decoding does not clamp). backend:
    of the scan, see `replayssm_kernels.choose_backend`. probe: first check that one pass, two chunks, single tokens
    and the unpatched model agree, and that equal rows get equal bits. With the Triton scan, also compile it for these
    rows and compare it with the torch scan. Everything is put back on exit, also after an error. Raises UsageError
    for a model that cannot be emulated, RunError when a check or a hook fails.
    """
    rows = as_rows(schemes, seed, document, prompt)
    if not hasattr(model, "config"):
        raise UsageError(
            f"attach takes a transformers model, not {type(model).__name__} (for the result of `load`, pass .model)"
        )
    mixers = state_layers(model)
    family = family_of(model.config.get_text_config())
    module = importlib.import_module(family.modeling)
    _check_can_attach(model, rows, family, module)
    chosen = choose_backend(backend, model.device, [row.scheme for row in rows])
    session = Session(rows, mixers, follow_hf_clamp, chosen, family.rule)
    unpatched = probe_unpatched(model) if probe else None  # before the functions are replaced
    with _replaced(model, family, module, session, mixers):
        if unpatched is not None:
            probe_session(model, session, unpatched)
            check_equal_rows(model, session, rows)
            session.start(rows)
            if session.backend == "triton":
                rehearse(model, session)
                session.start(rows)
        yield session


def _check_can_attach(model: Any, rows: Sequence[BatchRow], family: Family, module: ModuleType) -> None:
    for row in rows:
        if row.scheme.fold != "exact" and not family.rule.delta:
            raise UsageError(
                f"scheme {row.scheme}: +fold={row.scheme.fold} is a choice of delta-rule models; "
                f"{model.config.model_type} has none"
            )
    if model.training:
        raise UsageError(
            "the model is in training mode, where other functions compute the state: call model.eval() first"
        )
    if getattr(module, _SESSION, None) is not None:
        raise UsageError(f"another session is attached to {family.modeling}: leave it first")


@contextmanager
def _replaced(
    model: Any, family: Family, module: ModuleType, session: Session, mixers: dict[int, Any]
) -> Iterator[None]:
    """Inside the block the model runs through the session: functions are replaced, and hooks name the running layer."""
    rows = session.rows
    with ExitStack() as stack:
        stack.enter_context(without_dense_masks(model))
        if len(set(rows)) < len(rows) and model.device.type == "cpu":  # a control
            for owner, name, by_row in row_by_row(len(rows)):
                _set_until_exit(stack, owner, name, by_row)
        for path, function in {**family.patches(session), _SESSION: session}.items():
            *owners, name = path.split(".")
            _set_until_exit(stack, reduce(getattr, owners, module), name, function)
        if family.needs_attention and not _has_attention(model):
            last = session.layers[-1]
            _set_until_exit(stack, module, "create_causal_mask", lambda *args, **kwargs: None)
            _set_until_exit(stack, Cache, "get_seq_length", lambda cache, layer_idx=0: tokens_in_cache(cache, last))
        _set_until_exit(stack, Cache, "reorder_cache", _reorder_with(session, Cache.reorder_cache))
        watch, base = session.watch, base_model(model)
        for layer, mixer in mixers.items():
            stack.callback(mixer.register_forward_pre_hook(lambda *_, layer=layer: watch.enter(layer)).remove)
        stack.callback(base.register_forward_pre_hook(lambda *_: watch.begin()).remove)
        stack.callback(base.register_forward_hook(lambda *_: watch.end()).remove)
        yield


def _set_until_exit(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    if hasattr(owner, name):
        stack.callback(setattr, owner, name, getattr(owner, name))
    elif name == _SESSION:
        stack.callback(delattr, owner, name)
    else:
        raise RunError(
            f"{owner.__name__} of transformers {transformers.__version__} has no {name}: this version is not supported"
        )
    setattr(owner, name, value)


def _reorder_with(session: Session, original: Callable[[Any, Any], Any]) -> Callable[[Any, Tensor], None]:
    """`Cache.reorder_cache`, which also moves the states that live outside of the cache."""

    def reorder_cache(cache: Any, beam_idx: Tensor) -> None:
        original(cache, beam_idx)
        session.reorder(beam_idx.tolist())

    return reorder_cache


def _has_attention(model: Any) -> bool:
    """Whether the model has an attention layer; a config that does not list its layers counts as having one."""
    kinds = getattr(model.config, "layer_types", None)
    return kinds is None or "full_attention" in kinds
