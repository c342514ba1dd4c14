"""Time of the kernels beside their floor and their peers, all measured in one run.

The floor of a kernel is the largest of three times: its least bytes (inputs and outputs once) at the measured copy
bandwidth, its products at the measured TF32 matrix rate (as if one TF32 product were enough), and its element-wise
operations at the card's issue rate. No version can be much faster; the ratio to it is what is left to gain.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from replayssm_emulation import Rule, Scheme, UsageError, parse_scheme
from replayssm_kernels import BACKENDS, BatchRow, choose_backend, compile_only, replay_scan

from ..kl.metrics import compare_logits
from ..results.files import provenance
from .options import DEFAULT_SCHEMES

DELTA_SCHEMES = ("fp32", "fp32@1", "nvfp4@16", "nvfp4/fp16@16", "fp8@1")
RULES = ("plain", "gdn", "kda")  # the recurrence without and with the delta rule, of one decay a head and one a channel
VOCABULARY = 131072
# Instructions per element that a cast cannot do without: scale, clamp, round, scale back, sign; and to draw noise, a fourth of
# Philox4x32-10 (ten rounds of two wide products and two three-way exclusive ors) and the stochastic step's comparison.
_CAST_OPERATIONS, _NOISE_OPERATIONS = 8, 14


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v, beta, log decay


@dataclass(frozen=True)
class Shape:
    """One state layer: H heads of [d_v, d_k], their keys shared in G groups."""

    heads: int
    d_v: int
    d_k: int
    groups: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """From "HEADSxD_VxD_K" or "HEADSxD_VxD_KxGROUPS" (8 groups, or one, where none are given). Raises UsageError."""
        try:
            heads, d_v, d_k, *rest = (int(n) for n in text.split("x"))
            groups = rest[0] if rest else (8 if heads % 8 == 0 else 1)
            if len(rest) > 1 or min(heads, d_v, d_k, groups) < 1 or heads % groups:
                raise ValueError
        except ValueError:
            raise UsageError(
                f"--shape {text}: use HEADSxD_VxD_K, e.g. 128x64x128, or with groups 128x64x128x8"
            ) from None
        return cls(heads, d_v, d_k, groups)

    def __str__(self) -> str:
        return f"{self.heads}x{self.d_v}x{self.d_k}x{self.groups}"


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
    """Measure the scan for every scheme, a mixed batch, the comparison of logits, the delta rule and the peers; bf16 inputs on a GPU.

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
    clock = _Clock(where, repeats)
    with torch.inference_mode():
        if chosen == "triton" and gpu:  # the interpreter has nothing to compile
            say("compiling")
            with compile_only():
                _scan_all(layer, delta_layer, parsed, rows, where)
        ceilings = _ceilings(clock)
        inputs = _inputs(layer, tokens, rows, where)
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
                _entry(f"scan {name}", seconds, rows, tokens, *_scan_work(layer, batch, tokens, inputs), ceilings)
            )
        say("logits")
        measured.append(_logits(clock, rows, chosen, ceilings))
        say("peers")
        peers = _peers(clock, layer, inputs, rows, tokens)
        del inputs
        delta = _delta(clock, delta_layer, rows, tokens, chosen, ceilings, peers, say)
    return {
        "schema": "replayssm-eval/bench@1",
        "shape": str(layer),
        "tokens": tokens,
        "rows": rows,
        "dtype": str(_dtype(where)).removeprefix("torch."),
        "backend": chosen,
        "device": torch.cuda.get_device_name(where) if gpu else "cpu",
        "ceilings": ceilings,
        "kernels": measured,
        "delta": {"shape": str(delta_layer), "kernels": delta},
        "peers": peers,
    }


def _scan_all(layer: Shape, delta_layer: Shape, schemes: Sequence[Scheme], rows: int, device: torch.device) -> None:
    """Every scan that is timed, over a few tokens: side by side they compile several times faster than one by one."""
    for shape, rule, wanted in [
        (layer, "plain", schemes),
        *((delta_layer, rule, [parse_scheme(s) for s in DELTA_SCHEMES]) for rule in RULES),
    ]:
        inputs = _inputs(shape, 64, rows, device)
        inputs = inputs if rule == "plain" else _delta_inputs(inputs, rule == "kda")
        for scheme in wanted:
            replay_scan(*inputs, [BatchRow(scheme)] * rows, None, layer=0, rule=Rule(rule), backend="triton")


class _Clock:
    """Median seconds of a call, by device events on a GPU."""

    def __init__(self, device: torch.device, repeats: int):
        self.device, self.repeats = device, repeats

    def median(self, call: Callable[[], Any]) -> float:
        call()  # compiles, allocates
        return statistics.median(self._once(call) for _ in range(self.repeats))

    def _once(self, call: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(stop) / 1e3


def _ceilings(clock: _Clock) -> dict[str, float | None]:
    """Measured copy bandwidth and matrix rates; issue rate from the card's own numbers (None on a CPU)."""
    gpu = clock.device.type == "cuda"
    x = torch.empty((1 << 31 if gpu else 1 << 26) // 4, device=clock.device)
    y = torch.empty_like(x)
    copy = 2 * x.numel() * 4 / clock.median(partial(y.copy_, x))
    del x, y
    n = 8192 if gpu else 512

    def rate(dtype: torch.dtype, tf32: bool) -> float:
        a, b = (torch.randn(n, n, device=clock.device, dtype=dtype) for _ in range(2))
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            return 2 * n**3 / clock.median(lambda: a @ b)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    vector = None
    if gpu:
        facts = torch.cuda.get_device_properties(clock.device)
        khz = getattr(facts, "clock_rate", None)
        vector = facts.multi_processor_count * 128 * khz * 1e3 if khz else None
    return {
        "copy_bytes_per_s": copy,
        "bf16_flops_per_s": rate(torch.bfloat16, False) if gpu else None,
        "tf32_flops_per_s": rate(torch.float32, True),
        "instructions_per_s": vector,
    }


def _dtype(device: torch.device) -> torch.dtype:
    """Of the activations."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _inputs(layer: Shape, tokens: int, rows: int, device: torch.device) -> Inputs:
    """q, k, v, beta and log decay as a Mamba-2 layer makes them: memories of 50 to some thousand tokens."""
    g = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(rows, tokens, *shape, device=device, generator=g).to(_dtype(device))

    q, k, v = draw(layer.groups, layer.d_k), draw(layer.groups, layer.d_k), draw(layer.heads, layer.d_v)
    beta, rate = (torch.rand(rows, tokens, layer.heads, device=device, generator=g) for _ in range(2))
    return q, k, v, 0.1 * beta, -0.02 * rate


def _delta_inputs(inputs: Inputs, channels: bool) -> Inputs:
    """Those of `_inputs` as a delta-rule layer makes them: unit queries and keys in fp32, write strengths up to 1."""
    q, k, v, beta, decay = inputs
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (q, k))
    if channels:
        decay = decay.unsqueeze(-1) * torch.linspace(0.1, 2, k.shape[3], device=decay.device)
    return q * k.shape[3] ** -0.5, k, v, 10 * beta, decay


def _scan_work(
    layer: Shape, schemes: Sequence[Scheme], tokens: int, inputs: Inputs, rule: str = "plain"
) -> tuple[float, float, float]:
    """(bytes, product FLOPs, element-wise operations) that one call cannot do without."""
    state = layer.heads * layer.d_v * layer.d_k
    traffic = sum(x.numel() * x.element_size() for x in inputs) + 4 * inputs[2].numel() + 16 * state * len(schemes)
    flops = operations = 0.0
    for scheme in schemes:
        if scheme.window == 1:
            operations += (
                tokens * (4 if rule == "plain" else 5) * state
            )  # decay, write, read; the delta rule reads twice
        else:
            within = min(scheme.window, 16)
            # Every copy predicts the values of the delta rule; keys meet keys as well as queries, of every head where each decays.
            products = 2 if rule == "plain" else 3 if scheme.read is None else 4
            keys = (layer.heads if rule == "kda" else layer.groups) * layer.d_k
            pairs = (keys + layer.heads * layer.d_v) * (1 if rule == "plain" else 2)
            flops += tokens * 2 * (products * state + within * pairs)
        # With single tokens the read copy is made once, at the end.
        for copy in (scheme.recurrence, scheme.read if scheme.window > 1 else None):
            if copy is not None and copy.lossy:
                operations += (
                    tokens
                    / scheme.window
                    * state
                    * (_CAST_OPERATIONS + _NOISE_OPERATIONS * (copy.rounding == "stochastic"))
                )
    return traffic, flops, operations


def _entry(
    name: str,
    seconds: float,
    rows: int,
    tokens: int,
    traffic: float,
    flops: float,
    operations: float,
    ceilings: dict[str, Any],
) -> dict[str, Any]:
    parts: dict[str, float] = {
        "bytes": traffic / ceilings["copy_bytes_per_s"],
        "products": flops / ceilings["tf32_flops_per_s"],
    }
    if ceilings["instructions_per_s"]:
        parts["operations"] = operations / ceilings["instructions_per_s"]
    bound = max(parts, key=lambda part: parts[part])
    return {
        "name": name,
        "ms": 1e3 * seconds,
        "ms_per_row": 1e3 * seconds / rows,
        "us_per_token": 1e6 * seconds / tokens,
        "bytes": traffic,
        "flops": flops,
        "operations": operations,
        "floor_ms": 1e3 * parts[bound],
        "bound_by": bound,
        "ratio_to_floor": seconds / parts[bound],
    }


def _logits(clock: _Clock, rows: int, backend: str, ceilings: dict[str, Any]) -> dict[str, Any]:
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
    return _entry(name, clock.median(call), rows, block, 2.0 * logits.numel(), 0.0, 0.0, ceilings)


def _delta(
    clock: _Clock, layer: Shape, rows: int, tokens: int, backend: str, ceilings: dict[str, Any], peers: list[dict[str, Any]],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """The delta rule beside the plain recurrence of the same state: `ratio_to_plain` of their times. Adds its peers."""
    measured: list[dict[str, Any]] = []
    plain = _inputs(layer, tokens, rows, clock.device)
    for rule in RULES:
        inputs = plain if rule == "plain" else _delta_inputs(plain, rule == "kda")
        for place, name in enumerate(DELTA_SCHEMES):
            say(f"{rule} {name}")
            batch = [parse_scheme(name)] * rows
            seeded = [BatchRow(scheme, seed) for seed, scheme in enumerate(batch)]
            seconds = clock.median(
                partial(replay_scan, *inputs, seeded, None, layer=0, rule=Rule(rule), backend=backend)
            )
            work = _scan_work(layer, batch, tokens, inputs, rule)
            entry = _entry(f"{rule} {name}", seconds, rows, tokens, *work, ceilings)
            measured.append(
                {**entry, "ratio_to_plain": entry["ms"] / measured[place]["ms"] if rule != "plain" else 1.0}
            )
        if rule != "plain" and clock.device.type == "cuda":
            module = {"gdn": "gated_delta_rule", "kda": "kda"}[rule]
            q, k, v, beta, decay = inputs
            # Their chunked forms take no fp32, and one key per head.
            wide = [x.to(v.dtype).repeat_interleave(layer.heads // layer.groups, dim=2) for x in (q, k)]
            for name in (f"chunk_{module}", f"fused_recurrent_{module}"):

                def call(
                    name: str = name, module: str = module, x: list = wide, rest: tuple = (v, beta.to(v.dtype), decay)
                ) -> Any:
                    function = getattr(importlib.import_module(f"fla.ops.{module}"), name)
                    return function(*x, rest[0], g=rest[2], beta=rest[1], scale=1.0)

                _add_peer(peers, clock, f"flash-linear-attention {name} {layer}, no rounding", rows, tokens, call)
    return measured


def _add_peer(
    found: list[dict[str, Any]], clock: _Clock, name: str, rows: int, tokens: int, call: Callable[[], Any]
) -> None:
    try:
        seconds = clock.median(call)
    except (RuntimeError, ImportError, AttributeError, AssertionError, TypeError, ValueError) as error:
        found.append({"name": name, "error": " ".join(str(error).split())[:200]})
    else:
        found.append(
            {"name": name, "rows": rows, "tokens": tokens, "ms": 1e3 * seconds, "us_per_token": 1e6 * seconds / tokens}
        )
    if clock.device.type == "cuda":
        torch.cuda.empty_cache()


def _peers(clock: _Clock, layer: Shape, inputs: Inputs, rows: int, tokens: int) -> list[dict[str, Any]]:
    """Others' kernels for the same recurrence without rounding, on this run's inputs."""
    found: list[dict[str, Any]] = []
    add = partial(_add_peer, found, clock)
    q, k, v, beta, decay = inputs
    few = min(tokens, 256)
    as_rows = [BatchRow(parse_scheme("fp32"))] * rows
    start = (q[:, :few], k[:, :few], v[:, :few], beta[:, :few], decay[:, :few])
    add("torch scan, fp32@16", rows, few, lambda: replay_scan(*start, as_rows, None, layer=0, backend="torch"))
    modeling = importlib.import_module("transformers.models.nemotron_h.modeling_nemotron_h")
    some, rate = min(tokens, 2048), decay[0, 0].mean() / beta[0, 0].mean()
    a = rate.expand(layer.heads).float().contiguous()
    add(
        "transformers mamba2_chunk_scan, no rounding",
        1,
        some,
        lambda: modeling.mamba2_chunk_scan(
            v[:1, :some], beta[:1, :some].to(v.dtype), a, k[:1, :some], q[:1, :some], chunk_size=128, dt_softplus=False
        ),
    )
    state = torch.zeros(rows, layer.heads, layer.d_v, layer.d_k, device=clock.device)
    step = beta[:, 0, :, None].expand(-1, -1, layer.d_v).to(v.dtype)
    matrix = a[:, None, None].expand(-1, layer.d_v, layer.d_k)
    add(
        "transformers mamba2_selective_state_update, no rounding",
        rows,
        1,
        lambda: modeling.mamba2_selective_state_update(
            state, v[:, 0], step, matrix, k[:, 0], q[:, 0], dt_softplus=False
        ),
    )
    if clock.device.type == "cuda":
        share = layer.heads // layer.groups
        # Its operations take one key per head.
        wide = [x.repeat_interleave(share, dim=2) for x in (q, k)]
        for name in ("chunk_simple_gla", "fused_recurrent_simple_gla"):

            def call(name: str = name) -> Any:
                return getattr(importlib.import_module("fla.ops.simple_gla"), name)(*wide, v, g=decay)

            add(f"flash-linear-attention {name}, no rounding", rows, tokens, call)
    return found


def as_json(result: dict[str, Any], started: Any) -> dict[str, Any]:
    """The result with what is needed to repeat it."""
    return {**result, "provenance": provenance(started)}
