"""The means of the benchmark: shapes, inputs, the clock, the ceilings of the device and the least work of a scan."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from replayssm_emulation import Rule, Scheme, UsageError

# Least instructions per element. A cast scales, clamps, rounds, scales back and sets the sign. Its noise takes a fourth
# of Philox4x32-10 (ten rounds of two wide products and two three-way exclusive ors), and the stochastic step compares.
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
        """From "HEADSxD_VxD_K" or "HEADSxD_VxD_KxGROUPS"; 8 groups or one by default. Raises UsageError."""
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


@dataclass(frozen=True)
class Ceilings:
    """Highest rates of the device: copies in bytes/s, matrix products in FLOP/s, instructions/s. None if unknown."""

    copy_bytes_per_s: float
    bf16_flops_per_s: float | None
    tf32_flops_per_s: float
    instructions_per_s: float | None


@dataclass(frozen=True)
class Work:
    """The least work of one call: bytes moved, FLOPs of products, element-wise operations."""

    bytes: float
    flops: float
    operations: float


@dataclass(frozen=True)
class KernelTime:
    """One measured kernel beside its floor. The fields are the keys of the JSON."""

    name: str
    ms: float
    ms_per_row: float
    us_per_token: float
    bytes: float
    flops: float
    operations: float
    floor_ms: float
    bound_by: str
    ratio_to_floor: float


def kernel_time(name: str, seconds: float, rows: int, tokens: int, work: Work, ceilings: Ceilings) -> KernelTime:
    """The time of one call, with the largest of its three floors."""
    floors = {
        "bytes": work.bytes / ceilings.copy_bytes_per_s,
        "products": work.flops / ceilings.tf32_flops_per_s,
    }
    if ceilings.instructions_per_s:
        floors["operations"] = work.operations / ceilings.instructions_per_s
    bound = max(floors, key=lambda part: floors[part])
    return KernelTime(
        name=name,
        ms=1e3 * seconds,
        ms_per_row=1e3 * seconds / rows,
        us_per_token=1e6 * seconds / tokens,
        bytes=work.bytes,
        flops=work.flops,
        operations=work.operations,
        floor_ms=1e3 * floors[bound],
        bound_by=bound,
        ratio_to_floor=seconds / floors[bound],
    )


class Clock:
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


def measure_ceilings(clock: Clock) -> Ceilings:
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
    return Ceilings(
        copy_bytes_per_s=copy,
        bf16_flops_per_s=rate(torch.bfloat16, False) if gpu else None,
        tf32_flops_per_s=rate(torch.float32, True),
        instructions_per_s=vector,
    )


def activation_dtype(device: torch.device) -> torch.dtype:
    """Of the activations."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def plain_inputs(layer: Shape, tokens: int, rows: int, device: torch.device) -> Inputs:
    """q, k, v, beta and log decay as a Mamba-2 layer makes them: memories of 50 to some thousand tokens."""
    g = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(rows, tokens, *shape, device=device, generator=g).to(activation_dtype(device))

    q, k, v = draw(layer.groups, layer.d_k), draw(layer.groups, layer.d_k), draw(layer.heads, layer.d_v)
    beta, rate = (torch.rand(rows, tokens, layer.heads, device=device, generator=g) for _ in range(2))
    return q, k, v, 0.1 * beta, -0.02 * rate


def delta_inputs(inputs: Inputs, channels: bool) -> Inputs:
    """`plain_inputs` as a delta-rule layer makes them: unit queries and keys in fp32, write strengths up to 1."""
    q, k, v, beta, decay = inputs
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (q, k))
    if channels:
        decay = decay.unsqueeze(-1) * torch.linspace(0.1, 2, k.shape[3], device=decay.device)
    return q * k.shape[3] ** -0.5, k, v, 10 * beta, decay


def rule_inputs(layer: Shape, tokens: int, rows: int, device: torch.device, rule: Rule) -> Inputs:
    """q, k, v, beta and log decay of a layer with this rule."""
    inputs = plain_inputs(layer, tokens, rows, device)
    return delta_inputs(inputs, rule.per_channel) if rule.delta else inputs


def scan_work(layer: Shape, schemes: Sequence[Scheme], tokens: int, inputs: Inputs, rule: Rule = Rule.PLAIN) -> Work:
    """The least work of one scan."""
    state = layer.heads * layer.d_v * layer.d_k
    traffic = sum(x.numel() * x.element_size() for x in inputs) + 4 * inputs[2].numel() + 16 * state * len(schemes)
    flops = operations = 0.0
    for scheme in schemes:
        if scheme.window == 1:
            operations += (
                tokens * (4 if not rule.delta else 5) * state
            )  # decay, write, read; the delta rule reads twice
        else:
            within = min(scheme.window, 16)
            # Every copy predicts the values of the delta rule. Keys meet keys and queries, with KDA in every head.
            products = 2 if not rule.delta else 3 if scheme.read is None else 4
            keys = (layer.heads if rule.per_channel else layer.groups) * layer.d_k
            pairs = (keys + layer.heads * layer.d_v) * (1 if not rule.delta else 2)
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
    return Work(traffic, flops, operations)
