"""Equal rows get equal bits on a CPU: functions whose result depends on a row's place run once per row.

The control's KL of exactly 0 rests on it. A CPU kernel splits one tensor over threads without regard to rows. At the
end of each part, silu, sigmoid and softplus compute the last few elements one by one, with other bits than the
vectors before them. A matrix library picks its code by the alignment of its operands and of each thread's scratch
memory. Two equal rows of one call may therefore differ, depending on the number of threads and on the processor. Two
calls of one shape and one alignment do not differ. On a GPU a block of a kernel belongs to one row, and nothing is
done here.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CACHE_LINE = 64  # bytes
_FUNCTIONS = {
    F: ("linear", "conv1d", "silu", "softplus", "sigmoid", "gelu"),
    torch: ("sigmoid", "rsqrt"),
    Tensor: ("sigmoid", "rsqrt"),
}


def rows_alike(x: Tensor) -> list[Tensor]:
    """The rows of x, each `[1, ...]`, with the same strides and the same place in a cache line."""
    rows = list(x.split(1))
    if all(row.data_ptr() % _CACHE_LINE == 0 for row in rows):
        return rows
    return [row.clone(memory_format=torch.contiguous_format) for row in rows]  # torch aligns what it allocates


def row_by_row(rows: int) -> Iterator[tuple[Any, str, Callable]]:
    """(owner, name, replacement) of torch functions. A replacement computes a tensor `[rows, ...]` row by row."""
    for owner, names in _FUNCTIONS.items():
        for name in names:
            yield owner, name, _by_row(getattr(owner, name), rows)


def _by_row(function: Callable, rows: int) -> Callable:
    @wraps(function)
    def by_row(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(x) != rows or x.ndim == 1:
            return function(x, *args, **kwargs)
        return _joined([function(row, *args, **kwargs) for row in rows_alike(x)])

    return by_row


def _joined(rows: list[Tensor]) -> Tensor:
    """`[R, ...]` with the memory layout of the given rows. `torch.cat` alone would transpose a convolution's output."""
    axes = sorted(range(1, rows[0].ndim), key=rows[0].stride, reverse=True)
    inverse = [axes.index(axis) + 1 for axis in range(1, rows[0].ndim)]
    return torch.cat([row.permute(0, *axes) for row in rows]).permute(0, *inverse)
