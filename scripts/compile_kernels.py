"""Compile the scan kernel for a GPU that need not be here: finds what the interpreter cannot, and what spills.

python scripts/compile_kernels.py                           # a handful of schemes for Hopper (sm_90)
python scripts/compile_kernels.py --arch 100 --scheme fp8@1 --head 64x128
"""

import argparse
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # decides at import whether kernels are compiled at all

import triton
from replayssm_emulation import parse_scheme
from replayssm_kernels.scan_kernels import token_kernel, window_kernel
from replayssm_kernels.scan_triton import PIECE, specialisation, tiles_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SCHEMES = ("fp32", "nvfp4@16", "nvfp4/fp16@16", "fp8@1", "mxfp4-sr/int8@16", "nvfp4-4over6@16")
_POINTERS = {
    "q_ptr": "*bf16",
    "k_ptr": "*bf16",
    "v_ptr": "*bf16",
    "row_ptr": "*i32",
    "place_ptr": "*i32",
    "padding_ptr": "*i32",
    "piece_ptr": "*i32",
    "seed_ptr": "*i64",
    "document_ptr": "*i64",
}


def compile_scan(name: str, d_v: int, d_k: int, arch: int):
    """The compiled kernel of one scheme; the constants are those of `scan_triton`, for bf16 inputs."""
    scheme = parse_scheme(name)
    found = specialisation(scheme, d_v, d_k)
    if found is None:
        raise SystemExit(f"{name}: the kernel cannot run this scheme on heads of {d_v} x {d_k}")
    recurrence, read, shared, chained, reads_fold = found
    single = scheme.window == 1 and reads_fold
    tiles = tiles_of(found, single, d_v, d_k)
    constants = {
        "d_v": d_v, "d_k": d_k, "D_V": tiles.height, "N": tiles.width, "SLICES": tiles.slices,
        "RECURRENCE_CAST": recurrence, "READ_CAST": read, "SHARED": shared, "CHAINED": chained,
    }  # fmt: skip
    if single:
        kernel, constants = token_kernel, {**constants, "BY_COLUMN": tiles.by_column}
    else:
        kernel = window_kernel
        constants |= {"L": PIECE, "READS_FOLD": reads_fold, "LONG": False, "EXACT": True, "PRECISION": "tf32x2"}
    names = kernel.arg_names
    kinds = {n: _POINTERS.get(n, "*fp32" if n.endswith("_ptr") else "i32") for n in names}
    if single:
        kinds |= {"q_ptr": "*fp32", "k_ptr": "*fp32"}
    signature = {n: "constexpr" if n in constants else kinds[n] for n in names}
    aligned = [n for n in names if n.endswith(("_ptr", "_row", "_token"))]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(k),): v for k, v in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": tiles.warps, "maxnreg": tiles.registers, "num_stages": 1, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


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
    return f"{found[1]} registers, {found[2]} B stack" if found else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, help="compute capability x 10")
    parser.add_argument("--scheme", action="append")
    parser.add_argument("--head", default="64x128", help="d_v x d_k")
    args = parser.parse_args()
    d_v, d_k = (int(n) for n in args.head.split("x"))
    for name in args.scheme or SCHEMES:
        started = time.perf_counter()
        kernel = compile_scan(name, d_v, d_k, args.arch)
        took = time.perf_counter() - started
        print(f"{name:20} {args.head}  {took:5.1f} s  {kernel.metadata.shared:7} B shared  {resources(kernel.asm['cubin'])}")


if __name__ == "__main__":
    main()
