"""Where there is no GPU, Triton kernels run in the interpreter. Must be decided before triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
