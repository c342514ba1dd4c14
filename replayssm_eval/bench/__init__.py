"""The command `bench`: the kernels beside their floor and their peers."""
