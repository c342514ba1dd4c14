"""Time of the kernels beside their floor and their peers, all measured in one run.

The floor of a kernel is the largest of three times: its least bytes (inputs and outputs once) at the measured copy
bandwidth, its products at the measured TF32 matrix rate (as if one TF32 product were enough), and its element-wise
operations at the card's issue rate. No version can be much faster. The ratio to the floor shows the room that is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from replayssm_emulation import Rule, Scheme, UsageError, parse_scheme
from replayssm_kernels import BACKENDS, BatchRow, choose_backend, compile_only, replay_scan

from ..inference.metrics import compare_logits
from ..results.provenance import provenance
from .measure import (
    Ceilings,
    Clock,
    KernelTime,
    Shape,
    Work,
    activation_dtype,
    kernel_time,
    measure_ceilings,
    plain_inputs,
    rule_inputs,
    scan_work,
)
from .options import DEFAULT_SCHEMES
from .peers import Peer, delta_peers, plain_peers

DELTA_SCHEMES = ("fp32", "fp32@1", "nvfp4@16", "nvfp4/fp16@16", "fp8@1")
VOCABULARY = 131072


def run_bench(
    schemes: Sequence[str] = DEFAULT_SCHEMES,
    *,
    shape: str | None = None,
    delta_shape: str | None = None,
    tokens: int | None = None,
    rows: int = 9,
    backend: str = "auto",
    device: str = "auto",
    repeats: int = 5,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure the scan for every scheme, a mixed batch, the comparison of logits, the delta rule and the peers.

    Inputs are bf16 on a GPU, fp32 on a CPU.

    shape, tokens: None for one Nemotron-3-Super layer and 8,192 tokens on a GPU, for a testbed layer and 256 on a CPU.
    delta_shape: of the delta rule, and of the plain one beside it; None for a Qwen3-Next layer on a GPU.
    rows: batch rows of one call, with seeds 0, 1, .... Returns JSON-able facts. Raises UsageError for bad options.
    """
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}: use {', '.join(BACKENDS)}")
    for name, value in (("tokens", tokens or 1), ("rows", rows), ("repeats", repeats)):
        if value < 1:
            raise UsageError(f"--{name} {value}: must be at least 1")
    parsed = [parse_scheme(text) for text in schemes]
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    gpu = where.type == "cuda"
    layer = Shape.parse(shape or ("128x64x128" if gpu else "8x64x64"))
    delta_layer = Shape.parse(delta_shape or ("32x128x128x16" if gpu else "8x64x64"))
    tokens = tokens or (8192 if gpu else 256)
    chosen = choose_backend(backend, where, parsed)
    clock = Clock(where, repeats)
    with torch.inference_mode():
        if chosen == "triton" and gpu:  # the interpreter has nothing to compile
            say("compiling")
            with compile_only():
                _scan_all(layer, delta_layer, parsed, rows, where)
        ceilings = measure_ceilings(clock)
        inputs = plain_inputs(layer, tokens, rows, where)
        measured = []
        for batch in [[scheme] * rows for scheme in parsed] + (
            [parsed * (rows // len(parsed) + 1)] if len(parsed) > 1 else []
        ):
            batch = batch[:rows]
            name = str(batch[0]) if len(set(batch)) == 1 else "mixed: " + ", ".join(str(s) for s in batch)
            say(name)
            seeded = [BatchRow(scheme, seed) for seed, scheme in enumerate(batch)]
            seconds = clock.median(partial(replay_scan, *inputs, seeded, None, layer=0, backend=chosen))
            measured.append(
                kernel_time(f"scan {name}", seconds, rows, tokens, scan_work(layer, batch, tokens, inputs), ceilings)
            )
        say("logits")
        measured.append(_logits(clock, rows, chosen, ceilings))
        say("peers")
        peers = plain_peers(clock, layer, inputs, rows, tokens)
        del inputs
        delta, other_peers = _delta(clock, delta_layer, rows, tokens, chosen, ceilings, say)
    return {
        "schema": "replayssm-eval/bench@1",
        "shape": str(layer),
        "tokens": tokens,
        "rows": rows,
        "dtype": str(activation_dtype(where)).removeprefix("torch."),
        "backend": chosen,
        "device": torch.cuda.get_device_name(where) if gpu else "cpu",
        "ceilings": asdict(ceilings),
        "kernels": [asdict(kernel) for kernel in measured],
        "delta": {"shape": str(delta_layer), "kernels": [asdict(kernel) for kernel in delta]},
        "peers": [peer.as_json() for peer in [*peers, *other_peers]],
    }


def _scan_all(layer: Shape, delta_layer: Shape, schemes: Sequence[Scheme], rows: int, device: torch.device) -> None:
    """Every scan that is timed, over a few tokens: side by side they compile several times faster than one by one."""
    delta_schemes = [parse_scheme(name) for name in DELTA_SCHEMES]
    scans = [(layer, Rule.PLAIN, schemes), *((delta_layer, rule, delta_schemes) for rule in Rule)]
    for shape, rule, wanted in scans:
        inputs = rule_inputs(shape, 64, rows, device, rule)
        for scheme in wanted:
            replay_scan(*inputs, [BatchRow(scheme)] * rows, None, layer=0, rule=rule, backend="triton")


def _logits(clock: Clock, rows: int, backend: str, ceilings: Ceilings) -> KernelTime:
    """The comparison of logits, which reads every logit once."""
    gpu = clock.device.type == "cuda"
    block = max(1, (1 << 28 if gpu else 1 << 21) // (rows * VOCABULARY))
    logits = torch.randn(rows, block, VOCABULARY, device=clock.device).to(torch.bfloat16)
    targets = torch.zeros(block, dtype=torch.int64, device=clock.device)

    def call() -> Any:
        if backend != "triton":
            return compare_logits(logits, targets)
        from replayssm_kernels.triton_backend.logits import compare_logits_triton

        return compare_logits_triton(logits, targets)

    name = f"logits {rows} x {block} x {VOCABULARY}"
    return kernel_time(name, clock.median(call), rows, block, Work(2.0 * logits.numel(), 0.0, 0.0), ceilings)


@dataclass(frozen=True)
class DeltaTime(KernelTime):
    """A kernel of the delta rule, and its time over that of the plain recurrence of the same state."""

    ratio_to_plain: float


def _delta(
    clock: Clock, layer: Shape, rows: int, tokens: int, backend: str, ceilings: Ceilings, say: Callable[[str], None]
) -> tuple[list[DeltaTime], list[Peer]]:
    """The delta rule beside the plain recurrence of the same state, and other libraries' delta rules."""
    measured: list[DeltaTime] = []
    peers: list[Peer] = []
    for rule in Rule:
        inputs = rule_inputs(layer, tokens, rows, clock.device, rule)
        for place, name in enumerate(DELTA_SCHEMES):
            say(f"{rule.value} {name}")
            batch = [parse_scheme(name)] * rows
            seeded = [BatchRow(scheme, seed) for seed, scheme in enumerate(batch)]
            seconds = clock.median(partial(replay_scan, *inputs, seeded, None, layer=0, rule=rule, backend=backend))
            work = scan_work(layer, batch, tokens, inputs, rule)
            kernel = kernel_time(f"{rule.value} {name}", seconds, rows, tokens, work, ceilings)
            ratio = kernel.ms / measured[place].ms if rule.delta else 1.0
            measured.append(DeltaTime(**asdict(kernel), ratio_to_plain=ratio))
        if rule.delta and clock.device.type == "cuda":
            peers += delta_peers(clock, layer, inputs, rows, tokens, rule)
    return measured, peers


def as_json(result: dict[str, Any], started: Any) -> dict[str, Any]:
    """The result with what is needed to repeat it."""
    return {**result, "provenance": provenance(started)}
