"""Time and memory of the default `kl` run, part by part, on this machine.

python scripts/bench_kl.py                 # tiny-mamba2, 16,384 tokens
python scripts/bench_kl.py --tokens 4096
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from replayssm_emulation import get_format, quantize_with_noise, state_noise

from replayssm_eval import run_kl
from replayssm_eval.inference import metrics, session
from replayssm_eval.kl import reading
from replayssm_eval.kl import run as kl


def timed(module, name: str, totals: dict[str, float]) -> None:
    """Replace `module.name` by itself with a stopwatch."""
    original = getattr(module, name)

    def wrapped(*args, **kwargs):
        started = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            totals[name] = totals.get(name, 0.0) + time.perf_counter() - started

    setattr(module, name, wrapped)


def casts() -> dict[str, float]:
    """Milliseconds to cast one layer's state (8 heads x 64 x 64), noise apart; 64 positions of noise, per position."""
    x = torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(64)
    out = {}

    def best(function) -> float:
        function()
        spans = []
        for _ in range(20):
            started = time.perf_counter()
            function()
            spans.append(time.perf_counter() - started)
        return round(1e3 * sorted(spans)[len(spans) // 2], 3)

    draw = {"document": 0, "layer": 0, "heads": 8, "copy": 0, "d_v": 64, "d_k": 64}
    words = state_noise(0, positions=positions[:1], **draw)[0]
    with torch.inference_mode():
        for name in ("fp16", "fp8", "int8", "mxfp4", "nvfp4"):
            out[f"{name} nearest"] = best(lambda f=get_format(name): quantize_with_noise(x, f, None))
            out[f"{name} stochastic"] = best(lambda f=get_format(name): quantize_with_noise(x, f, words))
        out["noise"] = round(best(lambda: state_noise(0, positions=positions, **draw)) / len(positions), 3)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    args = parser.parse_args()
    totals: dict[str, float] = {}
    timed(kl, "load", totals)
    timed(kl, "encode", totals)
    timed(reading, "hidden_states", totals)
    timed(reading, "compare_hidden", totals)
    timed(kl, "_write", totals)
    timed(session, "replay_scan", totals)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = run_kl(tokens=args.tokens, output=Path(folder) / "out")
    total = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    json.dump(
        {
            "tokens": args.tokens,
            "rows": len(result["rows"]),
            "threads": torch.get_num_threads(),
            "seconds": round(total, 1),
            "parts": {k.strip("_"): round(v, 1) for k, v in totals.items()},
            "tokens_per_second": round(args.tokens / total),
            "peak_gib": round(peak, 2),
            "metrics_block_elements": metrics.BLOCK_ELEMENTS["cpu"],
            "cast_ms": casts(),
        },
        sys.stdout,
        indent=1,
    )
    print()


if __name__ == "__main__":
    main()
