"""Which implementation of the scan runs: the torch one everywhere, the Triton kernels where they can."""

import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from replayssm_emulation import Scheme, UsageError

from .state import BatchRow

BACKENDS = ("auto", "torch", "triton")


def choose_backend(wanted: str, device: torch.device, schemes: Sequence[Scheme] = ()) -> str:
    """ "torch" or "triton" for `wanted`, one of BACKENDS.

    "auto" is Triton if the package is installed, the GPU is an NVIDIA of compute capability 8 or more, and the kernels
    can run every scheme. Otherwise it is torch. Raises UsageError when "triton" cannot run here. It needs the package
    and such a GPU, or TRITON_INTERPRET=1, which runs kernels on a CPU, thousands of times slower.
    """
    if wanted not in BACKENDS:
        raise UsageError(f"unknown backend {wanted!r}: use {', '.join(BACKENDS)}")
    if wanted == "torch":
        return "torch"
    installed = importlib.util.find_spec("triton") is not None
    capable = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8
    if wanted == "auto":
        if not (installed and capable):
            return "torch"
        from .triton_backend.tiles import specialisation

        # The widest heads: what runs on these runs on all.
        return "triton" if all(specialisation(scheme, 256, 256) for scheme in schemes) else "torch"
    if not installed:
        raise UsageError("backend triton: the package triton is not installed; use torch")
    if not capable and os.environ.get("TRITON_INTERPRET") != "1":
        raise UsageError(
            f"backend triton needs an NVIDIA GPU of compute capability 8 or more, not {device} (or TRITON_INTERPRET=1 "
            "for a slow test); use torch"
        )
    return "triton"


def check_rows(rows: Sequence[BatchRow], d_v: int, d_k: int) -> None:
    """Raises UsageError naming the first scheme that the Triton kernels cannot run on heads of [d_v, d_k]."""
    from .triton_backend.tiles import specialisation

    for row in rows:
        if specialisation(row.scheme, d_v, d_k) is None:
            raise UsageError(f"backend triton cannot run {row.scheme} on heads of {d_v} x {d_k}; use torch")


def compile_only() -> AbstractContextManager[None]:
    """A block in which Triton scans compute nothing but compile, side by side, what they would run; outputs are NaN."""
    from .triton_backend.launch import compile_only

    return compile_only()


def compiled_kernels() -> int:
    """Scan kernels that this process has asked for so far. Each is compiled once.

    A schedule of windows needs two, single tokens need one, times the casts in use. The length, the number of rows and
    the layer add none.
    """
    from .triton_backend.launch import VARIANTS

    return len(VARIANTS)
