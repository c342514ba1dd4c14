"""Kernels of other libraries for the same recurrence without rounding, timed on the same inputs."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from replayssm_emulation import Rule, parse_scheme
from replayssm_kernels import BatchRow, replay_scan

from .measure import Clock, Inputs, Shape


@dataclass(frozen=True)
class Peer:
    """The seconds of one call of a peer, or the error with which it failed."""

    name: str
    rows: int
    tokens: int
    seconds: float = 0.0
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The entry in the JSON: a time or an error."""
        if self.error is not None:
            return {"name": self.name, "error": self.error}
        return {
            "name": self.name,
            "rows": self.rows,
            "tokens": self.tokens,
            "ms": 1e3 * self.seconds,
            "us_per_token": 1e6 * self.seconds / self.tokens,
        }


def _time_peer(clock: Clock, name: str, rows: int, tokens: int, call: Callable[[], Any]) -> Peer:
    try:
        peer = Peer(name, rows, tokens, seconds=clock.median(call))
    except (RuntimeError, ImportError, AttributeError, AssertionError, TypeError, ValueError) as error:
        peer = Peer(name, rows, tokens, error=" ".join(str(error).split())[:200])
    if clock.device.type == "cuda":
        torch.cuda.empty_cache()
    return peer


def delta_peers(clock: Clock, layer: Shape, inputs: Inputs, rows: int, tokens: int, rule: Rule) -> list[Peer]:
    """flash-linear-attention's kernels for the same delta rule."""
    module = {Rule.DELTA: "gated_delta_rule", Rule.DELTA_PER_CHANNEL: "kda"}[rule]
    q, k, v, beta, decay = inputs
    # Their chunked forms take no fp32, and one key per head.
    q, k = (x.to(v.dtype).repeat_interleave(layer.heads // layer.groups, dim=2) for x in (q, k))
    peers = []
    for name in (f"chunk_{module}", f"fused_recurrent_{module}"):

        def call(name: str = name) -> Any:
            function = getattr(importlib.import_module(f"fla.ops.{module}"), name)
            return function(q, k, v, g=decay, beta=beta.to(v.dtype), scale=1.0)

        title = f"flash-linear-attention {name} {layer}, no rounding"
        peers.append(_time_peer(clock, title, rows, tokens, call))
    return peers


def plain_peers(clock: Clock, layer: Shape, inputs: Inputs, rows: int, tokens: int) -> list[Peer]:
    """Other kernels for the same recurrence without rounding, on this run's inputs."""
    peers: list[Peer] = []

    def add(name: str, rows: int, tokens: int, call: Callable[[], Any]) -> None:
        peers.append(_time_peer(clock, name, rows, tokens, call))

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
    return peers
