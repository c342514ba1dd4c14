"""Which implementation of the scan runs: the torch one everywhere, the Triton kernel where it can and is asked for."""

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from replayssm_emulation import UsageError

if TYPE_CHECKING:
    from .scan import Row

BACKENDS = ("auto", "torch", "triton")


def choose_backend(wanted: str, device: torch.device) -> str:
    """ "torch" or "triton" for `wanted`, one of BACKENDS.

    "auto" is torch until the kernel has been measured on a GPU. Raises UsageError when "triton" cannot run here: it needs
    the package and a CUDA device, or TRITON_INTERPRET=1, which runs kernels on a CPU, thousands of times slower.
    """
    if wanted not in BACKENDS:
        raise UsageError(f"unknown backend {wanted!r}: use {', '.join(BACKENDS)}")
    if wanted != "triton":
        return "torch"
    if importlib.util.find_spec("triton") is None:
        raise UsageError("backend triton: the package triton is not installed; use torch")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UsageError(f"backend triton needs a CUDA device, not {device} (or TRITON_INTERPRET=1 for a slow test); use torch")
    return "triton"


def check_rows(rows: "Sequence[Row]", d_v: int, d_k: int) -> None:
    """Raises UsageError naming the first scheme that the Triton kernel cannot run on heads of [d_v, d_k]."""
    from .scan_triton import specialisation

    for row in rows:
        if specialisation(row.scheme, d_v, d_k) is None:
            raise UsageError(f"backend triton cannot run {row.scheme} on heads of {d_v} x {d_k}; use torch")
