"""The replay scan, fast. The torch scan runs everywhere and is the reference for faster ones."""

from .dispatch import BACKENDS, choose_backend, compile_only, compiled_kernels
from .scan import replay_scan
from .state import BatchRow, Carry, Group

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
