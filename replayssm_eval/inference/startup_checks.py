"""What `attach` checks before a run.

The model computes its state as emulated here; equal rows get equal bits; the Triton scan agrees with the torch scan.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from replayssm_emulation import Rule, RunError, parse_scheme
from replayssm_kernels import BatchRow, Carry, compile_only, replay_scan
from torch import Tensor

from .forward import hidden_states, new_cache
from .session import ScanInputs, Session

_TOKENS = (17, 23)


def _ids(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    vocab = model.get_output_embeddings().weight.shape[0]
    return torch.randint(0, vocab, (1, sum(_TOKENS)), generator=generator).to(model.device)


@torch.inference_mode()
def probe_unpatched(model: Any) -> Tensor:
    """Logits of the probe's text from the model as it is, for `probe_session`."""
    return model(input_ids=_ids(model), use_cache=False).logits.float()


@torch.inference_mode()
def probe_session(model: Any, session: Session, unpatched: Tensor) -> None:
    """One fp32 row reads a few dozen tokens in one pass, in two chunks and token by token; the model also reads them
    unpatched. Raises RunError unless all logits agree.

    A restarted or skipped state is wrong by the size of the logits themselves. Honest rounding is far smaller: errors
    of one unit roundoff u per operation add up like a random walk over ~10 operations per layer. The limit is 64
    times that walk in fp32 and 4 times in 16 bits, where 64 times would let a wrong state pass.
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
            hidden = hidden_states(model, ids[:, position : position + length], cache, position)
            parts.append(head(hidden.to(head.weight.dtype)).float())
            position += length
        return torch.cat(parts, dim=1)

    follow = session.follow_hf_clamp
    session.follow_hf_clamp = True  # as the unpatched model does
    pairs = {"the unpatched model": (logits([ids.shape[1]]), unpatched)}
    session.follow_hf_clamp = follow
    whole = logits([ids.shape[1]])
    pairs |= {"two chunks": (whole, logits(_TOKENS)), "single tokens": (whole, logits([1] * ids.shape[1]))}
    for name, (one, other) in pairs.items():
        other = other.to(one.device)  # accelerate returns the unpatched logits on the device of the input
        error = ((other - one).norm() / one.norm()).item()
        if not error <= limit:
            raise RunError(
                f"start-up probe: one pass and {name} differ by {error:.2g} of the logits (limit {limit:.2g}); "
                f"transformers {transformers.__version__} does not compute this model's state as emulated here"
            )


@torch.inference_mode()
def check_equal_rows(model: Any, session: Session, rows: Sequence[BatchRow]) -> None:
    """With fp32 states everywhere, rows that are equal in the run must get logits of equal bits.

    Checks a pass of many tokens and a pass of one. The control's KL of 0 rests on equal bits, and matrix libraries do
    not promise them. Raises RunError if two equal rows differ.
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
                    f"start-up check: rows {one} and {other} hold equal fp32 states, but their logits differ by "
                    f"{off:.2g} in a pass of {length} tokens: this machine gives equal rows other bits, and a control "
                    "would not be 0; set MKL_CBWR=COMPATIBLE or OMP_NUM_THREADS=1, and report this"
                )


class ScanComparison:
    """An observer of a session: the torch scan reads what the Triton scan reads, and must get the same outputs."""

    def __init__(self, rows: Sequence[BatchRow], rule: Rule):
        self._rows = list(rows)
        self._rule = rule
        self._carries: dict[int, Carry] = {}

    def __call__(self, layer: int, inputs: ScanInputs, o: Tensor) -> None:
        """o: `[R, T, H, d_v]` of the Triton scan. Raises RunError where the torch scan gets something else.

        Both scans round the same folds with the same noise. Their sums differ by fp32 roundoff, which may tip a state
        element over a rounding boundary and change the outputs that read it: at most a quarter of the outputs in a
        lossy row, and none in an exact row. A wrong kernel is wrong nearly everywhere.
        """
        expected, self._carries[layer] = replay_scan(
            *inputs, self._rows, self._carries.get(layer), layer=layer, rule=self._rule
        )
        for row, (got, wanted) in enumerate(zip(o, expected, strict=True)):
            scheme = self._rows[row].scheme
            off = (~((got - wanted).abs() <= 1e-4 * wanted.abs().max())).float().mean().item()
            lossy = any(copy is not None and copy.lossy for copy in (scheme.recurrence, scheme.read))
            if off > (0.25 if lossy else 0):
                raise RunError(
                    f"start-up check: state layer {layer}, {scheme}: {off:.1%} of the Triton scan's outputs differ "
                    "from the torch scan's; use --backend torch and report this"
                )


@torch.inference_mode()
def rehearse(model: Any, session: Session) -> None:
    """All rows read a few dozen tokens in two pieces. This compiles the kernels and compares both scans in every layer.

    The rehearsal's rows have no prompt, and flush early enough for the second piece to read what was rounded.
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
    with session.observed(ScanComparison(rows, session.rule)):
        read()
