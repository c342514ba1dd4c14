"""The replay scan, fast. The torch scan runs everywhere and is the reference for faster ones."""

from .dispatch import BACKENDS, choose_backend, compile_only, compiled_kernels
from .torch_backend.plain import BatchRow, Carry, Group, replay_scan

__all__ = [
    "BACKENDS",
    "BatchRow",
    "Carry",
    "Group",
    "choose_backend",
    "compile_only",
    "compiled_kernels",
    "replay_scan",
]
