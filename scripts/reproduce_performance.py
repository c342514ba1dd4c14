"""The performance evidence of reports/performance/, made again on this machine's GPU: JSON files and one line a check.

python scripts/reproduce_performance.py --output out                      # everything: some minutes on one H200
python scripts/reproduce_performance.py --output out --step bench         # one of bench, testbed, model, peers, delta
python scripts/reproduce_performance.py --output out --step large         # 120B parameters, on two such GPUs
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

TESTBED_SCHEMES = [
    "fp16@1",
    "fp8@1",
    "nvfp4@1",
    "fp8@16",
    "nvfp4@16",
    "nvfp4-rn@16",
    "fp16@16",
    "fp8/fp16@16",
    "nvfp4/fp16@16",
    "nvfp4/fp32@16",
]
MODEL_SCHEMES = ["fp16@1", "fp8@1", "fp8@16", "nvfp4@16", "nvfp4-rn@16", "fp16@16", "nvfp4/fp16@16"]
MODEL, TOKENS, CHUNK, ROWS = "nemotron-3-nano-4b", 131072, 2048, 9
FEW_SCHEMES = ["fp8@1", "fp8@16", "nvfp4@16", "nvfp4/fp16@16"]  # with the reference and the control, 6 rows
STEPS = ["bench", "testbed", "model", "peers", "delta"]
DELTA_MODEL = "qwen3.5-4b"
LARGE_MODEL, LARGE_TOKENS = "nemotron-3-super", 16384


def run(arguments: list[str]) -> tuple[str, float]:
    """(stdout, seconds) of a replayssm-eval command in its own process."""
    command = [sys.executable, "-m", "replayssm_eval", *arguments]
    print("$ replayssm-eval " + " ".join(arguments), flush=True)
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout, time.monotonic() - began


def kl(folder: Path, name: str, arguments: list[str], schemes: list[str], tokens: int = TOKENS) -> dict[str, Any]:
    """kl.json of a run, kept without its per-token files, and what it cost."""
    run_folder = folder / name
    flags = [flag for scheme in schemes for flag in ("--scheme", scheme)]
    _, seconds = run(
        ["kl", *arguments, "--tokens", str(tokens), *flags, "--output", str(run_folder), "--overwrite", "--quiet"]
    )
    result = json.loads((run_folder / "kl.json").read_text())
    result["provenance"]["wall_s"] = round(seconds, 1)
    result["provenance"]["command"] = result["provenance"]["command"].replace(str(folder), "OUT")
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1))
    made = result["provenance"]
    print(
        f"{name}: {seconds:.0f} s in all, {made['start_up_s']} s start-up, {made['reading_s']} s reading, "
        f"{made['compiled_kernels']} kernels, {made['peak_gpu_memory_gib']} GiB, control {result['control']['kl_max']}"
    )
    return result


def gpu_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Mean of `repeats` calls, after one that does not count."""
    import torch

    call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeats


def products(model: Any, rows: int) -> dict[str, Any]:
    """Seconds that the matrix products of `rows` rows of 131,072 tokens take by themselves, in bf16."""
    import torch

    shapes: dict[tuple[int, int], int] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            shape = (module.out_features, module.in_features)
            shapes[shape] = shapes.get(shape, 0) + 1
    floor = flops = 0.0
    with torch.inference_mode():
        for (out, into), count in shapes.items():
            tokens = rows * CHUNK if out < 100_000 else CHUNK  # the output head reads a row at a time
            x, w = (torch.randn(n, into, device="cuda", dtype=torch.bfloat16) for n in (tokens, out))
            floor += count * gpu_seconds(partial(torch.nn.functional.linear, x, w), 5) * rows * TOKENS / tokens
            flops += count * 2.0 * rows * TOKENS * out * into
    gpu = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    return {**gpu, "rows": rows, "matmul_floor_s": floor, "matmul_pflop": flops / 1e15}


def peers() -> dict[str, Any]:
    """Seconds of the model's products alone, and of transformers' own token-by-token decoding."""
    import torch
    from transformers import DynamicCache

    from replayssm_eval.models.loading import load

    model = load(MODEL, random_weights=True, device="cuda").model
    found = products(model, ROWS)
    with torch.inference_mode():
        for rows in (1, ROWS):
            cache, ids = DynamicCache(config=model.config), torch.zeros(rows, 1, dtype=torch.long, device="cuda")
            step = gpu_seconds(partial(model, input_ids=ids, cache=cache, use_cache=True), 64)
            found[f"hf_decode_s_per_token_{rows}_rows"] = step
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--step", action="append", choices=[*STEPS, "large"], help="default: all but large")
    args = parser.parse_args()
    steps = args.step or STEPS
    args.output.mkdir(parents=True, exist_ok=True)
    checks: list[tuple[str, float, float]] = []
    if "bench" in steps:
        text, _ = run(["bench", "--json", "--quiet"])
        (args.output / "bench.json").write_text(text)
        bench = json.loads(text)
        per_row = {k["name"]: k["ms_per_row"] for k in bench["kernels"]}
        delta = max(k["ratio_to_plain"] for k in bench["delta"]["kernels"])
        checks += [("the delta rule, times the plain recurrence", delta, 3)]
        checks += [
            ("nvfp4/fp16@16, ms a row", per_row["scan nvfp4/fp16@16"], 3),
            ("fp8@1, ms a row", per_row["scan fp8@1"], 12),
        ]
    if "testbed" in steps:
        result = kl(args.output, "tiny-mamba2", ["--model", "tiny-mamba2", "--chunk-size", "8192"], TESTBED_SCHEMES)
        checks += [
            ("testbed, s after start-up", result["provenance"]["reading_s"], 20),
            ("its control", result["control"]["kl_max"], 0),
        ]
    if "model" in steps:
        result = kl(args.output, MODEL, ["--random-weights", "--model", MODEL, "--chunk-size", "4096"], MODEL_SCHEMES)
        made = result["provenance"]
        checks += [(f"{MODEL}, s", made["wall_s"], 120), ("its GPU memory, GiB", made["peak_gpu_memory_gib"], 110)]
        checks += [("its control", result["control"]["kl_max"], 0)]
    if "peers" in steps:
        found = peers()
        (args.output / "peers.json").write_text(json.dumps(found, indent=1))
        print(json.dumps(found))
        model = args.output / f"{MODEL}.json"
        if model.exists():
            reading = json.loads(model.read_text())["provenance"]["reading_s"]
            decoding = found[f"hf_decode_s_per_token_{ROWS}_rows"] * TOKENS
            print(
                f"reading took {reading / found['matmul_floor_s']:.1f} times its products, "
                f"decoding would take {decoding / reading:.0f} times as long"
            )
    if "delta" in steps:
        from replayssm_eval.models.loading import load

        result = kl(
            args.output, DELTA_MODEL, ["--random-weights", "--model", DELTA_MODEL, "--chunk-size", "4096"], FEW_SCHEMES
        )
        floor = products(load(DELTA_MODEL, random_weights=True, device="cuda").model, len(FEW_SCHEMES) + 2)
        (args.output / f"{DELTA_MODEL}-floor.json").write_text(json.dumps(floor, indent=1))
        print(
            f"reading took {result['provenance']['reading_s'] / floor['matmul_floor_s']:.1f} times its products",
            json.dumps(floor),
        )
        checks += [(f"control of {DELTA_MODEL}", result["control"]["kl_max"], 0)]
    if "large" in steps:
        import torch

        if torch.cuda.device_count() < 2:
            sys.exit("--step large needs two GPUs")
        spread = ["--random-weights", "--model", LARGE_MODEL, "--device-map", "auto", "--chunk-size", "2048"]
        result = kl(args.output, LARGE_MODEL, spread, FEW_SCHEMES, LARGE_TOKENS)
        made = result["provenance"]
        checks += [(f"control of {LARGE_MODEL}", result["control"]["kl_max"], 0)]
        rate = (len(FEW_SCHEMES) + 2) * LARGE_TOKENS / made["reading_s"]
        print(f"{rate:.0f} tokens/s over all rows, GiB by GPU: {made.get('peak_gpu_memory_by_device_gib')}")
    failed = False
    for what, value, limit in checks:
        failed |= not value <= limit
        print(f"{'ok  ' if value <= limit else 'OVER'} {what}: {value:.4g} (limit {limit:g})")
    sys.exit(failed)


if __name__ == "__main__":
    main()
