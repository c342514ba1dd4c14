"""The replay scan in plain torch: runs everywhere, and is the reference for the Triton kernels."""
