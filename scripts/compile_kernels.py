"""Compile the scan kernels for a GPU that need not be here: finds what the interpreter cannot, and what spills.

Kernels are specialised as a real call on such a GPU would specialise them; nothing is launched.

python scripts/compile_kernels.py                           # a handful of schemes for Hopper (sm_90)
python scripts/compile_kernels.py --arch 100 --scheme fp8@1 --head 64x128
python scripts/compile_kernels.py --scheme fp32@20 --dtype float32 --head 10x12
python scripts/compile_kernels.py --delta kda --head 128x128

With --delta, v has --dtype; q and k are fp32, as models give them.
"""

import argparse
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # decides at import whether kernels are compiled at all

import torch
import triton
from replayssm_emulation import Rule, parse_scheme
from replayssm_kernels import BatchRow
from replayssm_kernels.state import zero_carry
from replayssm_kernels.triton_backend import launch as scan_triton
from triton.backends.compiler import GPUTarget

SCHEMES = ("fp32", "nvfp4@16", "nvfp4/fp16@16", "fp8@1", "mxfp4-sr/int8@16", "nvfp4-4over6@16", "fp16-rn@20")


class AbsentGpu:
    """What Triton asks a driver before it compiles."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_scan(name: str, d_v: int, d_k: int, dtype: torch.dtype, delta: str | None = None) -> list:
    """The compiled kernels of one scheme: two heads of one group, 8 windows. delta: "gdn" or "kda"."""
    scheme, kernels = parse_scheme(name), []

    def collect(kernel, grid, *args, **kwargs):
        kernels.append(kernel.warmup(*args, grid=grid, **kwargs))

    scan_triton._start = collect
    tokens = 8 * scheme.window
    q, k = torch.zeros(2, 1, tokens, 1, d_k, dtype=torch.float32 if delta else dtype)
    v = torch.zeros(1, tokens, 2, d_v, dtype=dtype)
    beta = torch.zeros(1, tokens, 2)
    log_decay = torch.zeros(1, tokens, 2, *([d_k] if delta == "kda" else []))
    rows, o = [BatchRow(scheme)], torch.zeros(1, tokens, 2, d_v)
    groups = zero_carry(rows, k, v, beta, log_decay).groups
    # Not through `replay_scan`, which converts what lies on a CPU.
    scan_triton.scan_groups(q, k, v, beta, log_decay, o, groups, rows, 0, 0, Rule(delta or "plain"))
    return kernels


def resources(cubin: bytes) -> str:
    """Registers and stack (spills) per thread, by the cuobjdump that Triton carries."""
    tool = next(Path(triton.__file__).parent.rglob("bin/cuobjdump"), None)
    if tool is None:
        return "unknown"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=False).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return f"{found[1]:>3} registers, {found[2]:>4} B stack" if found else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, help="compute capability x 10")
    parser.add_argument("--scheme", action="append")
    parser.add_argument("--head", default="64x128", help="d_v x d_k")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of q, k and v")
    parser.add_argument("--delta", choices=["gdn", "kda"], help="the delta rule: one decay a head, or one a channel")
    args = parser.parse_args()
    triton.runtime.driver.set_active(AbsentGpu(args.arch))
    d_v, d_k = (int(n) for n in args.head.split("x"))
    for name in args.scheme or SCHEMES:
        started = time.perf_counter()
        kernels = compile_scan(name, d_v, d_k, getattr(torch, args.dtype), args.delta)
        took = time.perf_counter() - started
        for kernel in kernels:
            what = f"{kernel.metadata.shared:6} B shared  {resources(kernel.asm['cubin'])}"
            print(f"{name:20} {args.head}  {kernel.metadata.name:20} {kernel.metadata.num_warps} warps  {what}")
        print(f"{name:20} compiled in {took:.1f} s")


if __name__ == "__main__":
    main()
