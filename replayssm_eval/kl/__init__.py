"""The command `kl`: teacher-forced KL of every scheme against fp32 state."""
