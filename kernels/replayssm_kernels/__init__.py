"""The replay scan, fast. The torch scan runs everywhere and is the reference for faster ones."""

from .dispatch import BACKENDS, choose_backend, compile_only, compiled_kernels
from .torch_backend.plain import Carry, Group, Row, replay_scan

__all__ = ["BACKENDS", "Carry", "Group", "Row", "choose_backend", "compile_only", "compiled_kernels", "replay_scan"]
