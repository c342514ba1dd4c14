"""The command `bench`. Heavy imports happen inside it, so that --help answers at once."""

import datetime
import json
import sys
from dataclasses import asdict
from typing import Any

from ..bench.options import BenchOptions
from .console import print_listing
from .options import Json, Quiet, takes_options

EPILOG = "Example: replayssm-eval bench --scheme nvfp4/fp16@16 --scheme fp8@1 --json"


@takes_options(BenchOptions)
def bench(options: BenchOptions, quiet: Quiet = False, as_json: Json = False) -> None:
    """Time the kernels beside their floor and their peers, in one run on this machine."""
    options.check()  # before torch is imported: a typing error should cost no wait
    from ..bench import run as module

    started = datetime.datetime.now(datetime.UTC)
    result = module.run_bench(
        **asdict(options),
        say=(lambda line: None) if quiet else (lambda line: print(f"timing {line}", file=sys.stderr)),
    )
    if as_json:
        print(json.dumps(module.as_json(result, started), indent=1))
        return
    _print_bench(result)


def _print_bench(result: dict[str, Any]) -> None:
    columns = ("kernel", "ms", "ms/row", "µs/token", "GB", "TFLOP", "floor ms", "bound by", "ratio")

    def cells(k: dict[str, Any]) -> tuple:
        times = (k["ms"], k["ms_per_row"], k["us_per_token"], k["bytes"] / 1e9, k["flops"] / 1e12, k["floor_ms"])
        return (k["name"], *(f"{n:.3g}" for n in times), k["bound_by"], f"{k['ratio_to_floor']:.3g}")

    title = (
        f"{result['shape']} (heads x d_v x d_k x groups), {result['tokens']} tokens, {result['rows']} rows, "
        f"{result['dtype']}, {result['backend']} scan, {result['device']}"
    )
    print_listing(title, columns, [cells(k) for k in result["kernels"]], False)
    delta = [(*cells(k), f"{k['ratio_to_plain']:.3g}") for k in result["delta"]["kernels"]]
    print_listing(
        f"Delta rule beside the plain recurrence, {result['delta']['shape']}", (*columns, "to plain"), delta, False
    )
    peers = []
    for p in result["peers"]:
        measured = (f"{p['ms']:.3g}", f"{p['us_per_token']:.3g}") if "ms" in p else ("", p["error"])
        peers.append((p["name"], p.get("rows", ""), p.get("tokens", ""), *measured))
    print_listing("Peers in the same run", ("peer", "rows", "tokens", "ms", "µs/token"), peers, False)
    rates = result["ceilings"]
    parts = [
        f"copy {rates['copy_bytes_per_s'] / 1e12:.2f} TB/s",
        f"TF32 {rates['tf32_flops_per_s'] / 1e12:.3g} TFLOP/s",
    ]
    parts += [f"bf16 {rates['bf16_flops_per_s'] / 1e12:.3g} TFLOP/s"] if rates["bf16_flops_per_s"] else []
    parts += (
        [f"{rates['instructions_per_s'] / 1e12:.3g} T instructions/s (from the card's clock)"]
        if rates["instructions_per_s"]
        else []
    )
    print("measured here: " + ", ".join(parts))
