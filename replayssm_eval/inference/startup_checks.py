"""What `attach` checks before a run: that the model computes its state as emulated here, and that both scans agree on it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from replayssm_emulation import RunError, parse_scheme
from replayssm_kernels import BatchRow, compile_only
from torch import Tensor

from .forward import hidden_states, new_cache

if TYPE_CHECKING:
    from .session import Session

_TOKENS = (17, 23)


def _ids(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    vocab = model.get_output_embeddings().weight.shape[0]
    return torch.randint(0, vocab, (1, sum(_TOKENS)), generator=generator).to(model.device)


@torch.inference_mode()
def probe_unpatched(model: Any) -> Tensor:
    return model(input_ids=_ids(model), use_cache=False).logits.float()


@torch.inference_mode()
def probe_session(model: Any, session: "Session", unpatched: Tensor) -> None:
    """One pass = two chunks = single tokens = the unpatched model, for one fp32 row of a few dozen tokens.

    A restarted or skipped state is wrong by the size of the logits themselves. Honest rounding is far smaller: errors of
    one unit roundoff u per operation add up like a random walk over ~10 operations a layer, and the limit is 4 times that
    in 16 bits, where 64 times, as in fp32, would let a wrong state pass.
    """
    ids = _ids(model)
    head = model.get_output_embeddings()
    roundoff = torch.finfo(head.weight.dtype).eps / 2
    walk = roundoff * (10 * model.config.get_text_config().num_hidden_layers) ** 0.5
    limit = min(0.25, (64 if head.weight.dtype == torch.float32 else 4) * walk)

    def logits(pieces: Sequence[int]) -> Tensor:
        session.start([BatchRow(parse_scheme("fp32"))])
        cache, position, parts = new_cache(model), 0, []
        for length in pieces:
            parts.append(
                head(
                    hidden_states(model, ids[:, position : position + length], cache, position).to(head.weight.dtype)
                ).float()
            )
            position += length
        return torch.cat(parts, dim=1)

    follow = session.follow_hf_clamp
    session.follow_hf_clamp = True  # as the unpatched model does
    pairs = {"the unpatched model": (logits([ids.shape[1]]), unpatched)}
    session.follow_hf_clamp = follow
    whole = logits([ids.shape[1]])
    pairs |= {"two chunks": (whole, logits(_TOKENS)), "single tokens": (whole, logits([1] * ids.shape[1]))}
    for name, (one, other) in pairs.items():
        error = (
            (other.to(one.device) - one).norm() / one.norm()
        ).item()  # accelerate brings the unpatched model's to the input
        if not error <= limit:
            raise RunError(
                f"start-up probe: one pass and {name} differ by {error:.2g} of the logits (limit {limit:.2g}); transformers "
                f"{transformers.__version__} does not compute this model's state as emulated here"
            )


@torch.inference_mode()
def check_equal_rows(model: Any, session: "Session", rows: Sequence[BatchRow]) -> None:
    """With fp32 states everywhere, rows that are equal in the run must have logits of equal bits: in a pass of many tokens and of one.

    The control's KL of 0 rests on it, and matrix libraries do not promise it. Raises RunError where one breaks it.
    """
    twins = [(rows.index(row), i) for i, row in enumerate(rows) if rows.index(row) < i]
    if not twins:
        return
    ids = _ids(model).expand(len(rows), -1)
    head = model.get_output_embeddings()
    session.start([BatchRow(parse_scheme("fp32"))] * len(rows))
    cache, position = new_cache(model), 0
    for length in (ids.shape[1] - 1, 1):
        logits = head(hidden_states(model, ids[:, position : position + length], cache, position).to(head.weight.dtype))
        position += length
        for one, other in twins:
            if not torch.equal(logits[one], logits[other]):
                off = (logits[one].float() - logits[other].float()).abs().max().item()
                raise RunError(
                    f"start-up check: rows {one} and {other} hold equal fp32 states, but their logits differ by {off:.2g} in a pass of "
                    f"{length} tokens: this machine gives equal rows other bits, and a control would not be 0; set MKL_CBWR=COMPATIBLE "
                    "or OMP_NUM_THREADS=1, and report this"
                )


@torch.inference_mode()
def rehearse(model: Any, session: "Session") -> None:
    """All rows read a few dozen tokens in two pieces: kernels are compiled, and compared with the torch scan in every layer.

    Without a prompt, and with flushes early enough to be read, whatever the rows of the run wait for.
    """
    ids = _ids(model).expand(len(session.rows), -1)
    first = _TOKENS[0]
    early = (first - 2, first + 14, ids.shape[1] - 2)
    rows = [
        replace(r, prompt=0, padding=0, flushes=None if r.flushes is None and r.scheme.window <= first else early)
        for r in session.rows
    ]

    def read() -> None:
        session.start(rows)
        cache = new_cache(model)
        hidden_states(model, ids[:, :first], cache, 0)
        hidden_states(model, ids[:, first:], cache, first)

    if model.device.type == "cuda":  # the interpreter has nothing to compile
        with compile_only():
            read()
    session._twins = {}
    try:
        read()
    finally:
        session._twins = None
