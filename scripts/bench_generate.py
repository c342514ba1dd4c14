"""Tokens per second of generation: transformers' `generate`, our steps one by one, our replayed steps (CUDA graphs).

python scripts/bench_generate.py --model tiny-mamba2 --batch 64 --tokens 512 --scheme nvfp4/fp16@16
python scripts/bench_generate.py --model nemotron-3-nano-4b --random-weights --batch 9 --tokens 64

All rows generate all tokens. JSON on stdout has a row per way, with the number of graphs that were captured (warm-up
included). The answers of replayed steps are compared with those of the steps one by one.
"""

import argparse
import json
import sys
import time

import torch
from replayssm_emulation import parse_scheme
from replayssm_kernels import BatchRow

from replayssm_eval import attach
from replayssm_eval.inference.decoding import decode
from replayssm_eval.models.loading import load


def timed(call, device):
    """(result, seconds), waiting for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-mamba2")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--scheme", action="append", help="default: fp32, nvfp4@16, nvfp4/fp16@16, fp8@1")
    args = parser.parse_args()
    loaded = load(args.model, random_weights=args.random_weights, device=args.device)
    model, device = loaded.model, loaded.model.device
    ids = torch.randint(
        1, model.config.vocab_size, (args.batch, args.prompt), generator=torch.Generator().manual_seed(0)
    ).to(device)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    rows: list[dict] = []

    def measure(way, scheme, prepare=lambda: None, window=1, graphs=lambda: 0, **more):
        def generate(tokens):
            prepare()
            return model.generate(ids, max_new_tokens=tokens, **options, **more)

        before = graphs()
        generate(min(args.tokens, 2 * window + 1))  # compiles
        out, seconds = timed(lambda: generate(args.tokens), device)
        rate = args.batch * args.tokens / seconds
        rows.append(
            {
                "way": way,
                "scheme": scheme,
                "seconds": round(seconds, 3),
                "tokens_per_s": round(rate, 1),
                "graphs": graphs() - before,
            }
        )
        print(f"{way:12} {scheme:16} {rate:10.0f} tokens/s", file=sys.stderr, flush=True)
        return out[:, args.prompt :]

    with torch.inference_mode():
        try:
            measure("transformers", "-")
        except (AttributeError, ValueError) as error:  # without attention layers, a cache does not know its length
            print(f"transformers cannot: {error}", file=sys.stderr)
        for text in args.scheme or ["fp32", "nvfp4@16", "nvfp4/fp16@16", "fp8@1"]:
            scheme = parse_scheme(text)
            seeded = [BatchRow(scheme, document=n, prompt=args.prompt) for n in range(args.batch)]
            with attach(model, seeded, backend=args.backend) as session:
                begin = {
                    "prepare": lambda session=session, seeded=seeded: session.start(seeded),
                    "custom_generate": decode,
                    "window": scheme.window,
                    "graphs": lambda session=session: session.graphs_captured,
                }
                steps = measure("step by step", text, **begin)
                replayed = measure("replayed", text, session=session, **begin)
                rows[-1]["same_tokens"] = (steps == replayed).float().mean().item()
    print(
        json.dumps(
            {
                "model": args.model,
                "random_weights": args.random_weights,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "batch": args.batch,
                "prompt": args.prompt,
                "tokens": args.tokens,
                "rows": rows,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
