"""Rounding against independent oracles: ml_dtypes and torch for nearest even, gfloat for stochastic."""

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.formats import (
    format_info_bfloat16,
    format_info_binary16,
    format_info_ocp_e2m1,
    format_info_ocp_e2m3,
    format_info_ocp_e3m2,
    format_info_ocp_e4m3,
    format_info_ocp_e5m2,
)
from replayssm_emulation.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, FP16, Integer
from replayssm_emulation.rounding import round_elements

from tests.helpers.tensors import every_16_bit_value, random_32_bit_values, same_bits

ORACLES = {
    FP16: (np.float16, format_info_binary16),
    BF16: (ml_dtypes.bfloat16, format_info_bfloat16),
    E4M3: (ml_dtypes.float8_e4m3fn, format_info_ocp_e4m3),
    E5M2: (ml_dtypes.float8_e5m2, format_info_ocp_e5m2),
    E2M1: (ml_dtypes.float4_e2m1fn, format_info_ocp_e2m1),
    E2M3: (ml_dtypes.float6_e2m3fn, format_info_ocp_e2m3),
    E3M2: (ml_dtypes.float6_e3m2fn, format_info_ocp_e3m2),
}
ELEMENTS = list(ORACLES)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
@pytest.mark.parametrize(
    "values", [every_16_bit_value(), random_32_bit_values(200_000, 1)], ids=["every-16-bit", "random-32-bit"]
)
def test_nearest_equals_the_library_cast(element, values) -> None:
    # The library casts overflow in their own ways; all of ours saturate, so the oracle sees clamped values.
    clamped = values.clamp(-element.max, element.max)
    expected = clamped.numpy().astype(ORACLES[element][0]).astype(np.float32)
    assert same_bits(round_elements(values, element), torch.from_numpy(expected))


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_stochastic_equals_gfloat(element) -> None:
    rng = np.random.default_rng(2)
    # Two decades around the whole range of the format, and a tail far below its smallest subnormal.
    spread = rng.uniform(element.min_exponent - 8, min(element.max_exponent + 1, 120), 3000)
    values = (rng.choice([-1.0, 1.0], 3000) * np.exp2(spread)).astype(np.float32)
    noise = rng.integers(0, 1 << 32, 3000, dtype=np.uint64)
    got = round_elements(torch.from_numpy(values), element, torch.from_numpy(noise.astype(np.int64)))
    mode = gfloat.RoundMode.StochasticFastest
    expected = [
        gfloat.round_float(ORACLES[element][1], float(v), mode, sat=True, srbits=int(r), srnumbits=32)
        for v, r in zip(values, noise, strict=True)
    ]
    assert same_bits(got, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("element", [*ELEMENTS, Integer("int8", 8, 127.0)], ids=lambda e: e.name)
def test_special_values(element) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    for noise in (None, torch.full((5,), (1 << 32) - 1)):
        y = round_elements(x, element, noise)
        assert y[:2].tolist() == [element.max, -element.max]
        assert y[2].isnan()
        assert same_bits(y[3:], x[3:])


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_representable_values_never_move(element) -> None:
    grid = round_elements(every_16_bit_value(), element).unique()
    for word in (0, 1, (1 << 31), (1 << 32) - 1):
        assert same_bits(round_elements(grid, element, torch.full_like(grid, word, dtype=torch.int64)), grid)


@pytest.mark.parametrize("fraction", [1 / 2, 1 / 256, 1 / 3])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_stochastic_rounding_is_unbiased(fraction, sign) -> None:
    """The mean of N draws is within 4 standard errors, 4·sqrt(p(1-p)/N) steps, for each of 50 seeds (Q7)."""
    count, step = 4096, 0.125  # spacing of e4m3 in [1, 2)
    x = torch.full((count,), sign * (1 + fraction * step))
    p = float((x[0].abs() - 1) / step)
    for seed in range(50):
        noise = torch.from_numpy(np.random.default_rng(seed).integers(0, 1 << 32, count))
        y = round_elements(x, E4M3, noise)
        assert set(y.abs().unique().tolist()) <= {1.0, 1.125}
        assert abs((y.abs().mean().item() - 1) / step - p) <= 4 * (p * (1 - p) / count) ** 0.5


def test_sign_symmetry() -> None:
    x = random_32_bit_values(10_000, 3)
    noise = torch.from_numpy(np.random.default_rng(4).integers(0, 1 << 32, len(x)))
    for element in ELEMENTS:
        assert same_bits(round_elements(-x, element, noise), -round_elements(x, element, noise))
