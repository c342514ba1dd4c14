"""Tensors that several tests use: values that reach every rounding, equality of bits, the copies of a carry."""

import numpy as np
import torch


def every_16_bit_value() -> torch.Tensor:
    """Every finite fp16 and every finite bf16 value: all exponents, and ties of every narrower format."""
    words = np.arange(1 << 16, dtype=np.uint16)
    values = np.concatenate(
        [words.view(np.float16).astype(np.float32), (words.astype(np.uint32) << 16).view(np.float32)]
    )
    return torch.from_numpy(values[np.isfinite(values)])


def random_32_bit_values(count: int, seed: int) -> torch.Tensor:
    words = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    values = words.view(np.float32)
    return torch.from_numpy(values[np.isfinite(values)].copy())


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit patterns agree, signs of zero included; any NaN equals any NaN."""
    got, expected = got.flatten(), expected.flatten()
    equal = got.view(torch.int32) == expected.view(torch.int32)
    return bool((equal | (got.isnan() & expected.isnan())).all())


def copies(carry) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Row -> (recurrence copy, read copy)."""
    return {row: (g.recurrence[i], g.read[i]) for g in carry.groups for i, row in enumerate(g.rows)}
