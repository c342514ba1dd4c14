"""The replay scan as Triton kernels, for NVIDIA GPUs."""
