"""Small scans with every recurrence, kind of cast and head, for NVIDIA's compute-sanitizer.

python scripts/sanitize_scans.py                                # once: is every output written?
python scripts/sanitize_scans.py --tool memcheck --tool initcheck --tool racecheck > log

With --tool the script compiles first. Then it runs itself under compute-sanitizer (of the CUDA toolkit, on PATH), which
prints its findings. Exit code 1 if it finds anything.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys

import torch
from replayssm_emulation import Rule, parse_scheme
from replayssm_kernels import BatchRow, compile_only, replay_scan

SCHEMES = ("fp32", "fp16@1", "fp8@1", "nvfp4@16", "nvfp4/fp16@16", "fp8/fp16@16+cast=chained", "mxfp4-sr/int8@20")
HEADS = ((64, 128), (80, 48), (10, 12))  # d_v, d_k
PIECES = (33, 1, 14)  # tokens a call: full windows, a single token, an unfinished window
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")


def scan_all(device: str, backend: str) -> list[tuple[str, torch.Tensor]]:
    """Outputs of all schemes in one batch, for every recurrence and size of head."""
    rows = [BatchRow(parse_scheme(scheme), seed=1, document=n) for n, scheme in enumerate(SCHEMES)]
    found = []
    for rule, (d_v, d_k) in itertools.product(Rule, HEADS):
        g = torch.Generator().manual_seed(0)
        tokens, carry, parts = sum(PIECES), None, []
        q, k = (torch.randn(len(rows), tokens, 2, d_k, generator=g) / d_k**0.5 for _ in range(2))
        v = torch.randn(len(rows), tokens, 4, d_v, generator=g)
        beta = torch.rand(len(rows), tokens, 4, generator=g)
        log_decay = -0.1 * torch.rand(len(rows), tokens, 4, *([d_k] if rule.per_channel else []), generator=g)
        inputs = [x.to(device) for x in (q, k, v, beta, log_decay)]
        for q, k, v, beta, log_decay in zip(*(x.split(PIECES, dim=1) for x in inputs), strict=True):
            o, carry = replay_scan(q, k, v, beta, log_decay, rows, carry, layer=3, rule=rule, backend=backend)
            parts.append(o)
        found.append((f"{rule.value}, heads of {d_v} x {d_k}", torch.cat(parts, dim=1).cpu()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--tool", action="append", choices=TOOLS, default=[])
    args = parser.parse_args()
    if args.tool and args.backend == "triton":  # not inside a tool: where nothing runs, nothing is written
        with compile_only():
            scan_all(args.device, args.backend)
    here = scan_all(args.device, args.backend)
    for name, o in here:
        if not torch.isfinite(o).all():
            sys.exit(f"{name}: an output is not finite, so it was not written or was made of something that was not")
    print(f"{len(Rule)} recurrences, {len(HEADS)} head sizes, {len(SCHEMES)} schemes: all outputs written", flush=True)
    failed = False
    for tool in args.tool:
        program = shutil.which("compute-sanitizer")
        if program is None:
            sys.exit("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
        print(f"$ compute-sanitizer --tool {tool} python scripts/sanitize_scans.py", flush=True)
        once = [sys.executable, __file__, "--device", args.device, "--backend", args.backend]
        # In torch's own pool, an access past a tensor's end often hits another tensor, and old memory counts as
        # written.
        alone = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        failed |= (
            subprocess.run([program, "--tool", tool, "--error-exitcode", "1", *once], env=alone, check=False).returncode
            != 0
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
