"""Triton kernels run in the interpreter, so that every test needs only a CPU. Must be set before triton is imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
