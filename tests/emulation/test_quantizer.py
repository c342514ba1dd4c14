"""`quantize` as a user calls it, and the public fault reports about quantisation (cases S6, Q1, Q2, Q4)."""

import pytest
import torch
from replayssm_emulation import FORMATS, UsageError, counts, get_format, parse_scheme, quantize

from tests.helpers.tensors import same_bits

ROUNDED = [name for name in FORMATS if name != "fp32"]


@pytest.mark.parametrize("name", [*ROUNDED, "fp8-head", "int4-b32", "mxfp4-even", "mxfp8-rceil", "fp8-unscaled"])
def test_shape_dtype_and_input_are_kept(name) -> None:
    x = torch.randn(2, 3, 5, 60, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    for rounding in ("nearest", "stochastic"):
        y = quantize(x, name, rounding, seed=3)
        assert y.shape == x.shape
        assert y.dtype == torch.float32
        assert torch.equal(x, before)
        # Half a step (a whole one when stochastic) relative to the block's largest value bounds every error.
        steps = {"nearest": 0.5, "stochastic": 1.0}[rounding]
        worst = {4: 0.34, 6: 0.13, 8: 0.13, 16: 0.008}[get_format(name).element.bits]
        assert (y - x).abs().max() <= 2 * steps * worst * x.abs().max()


def test_stored_values_are_fixed_points_of_unscaled_and_mx_formats() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    for name in ("bf16", "fp16", "mxfp8", "mxfp6", "mxfp4"):
        y = quantize(x, name)
        assert same_bits(quantize(y, name), y)


def test_same_key_same_noise_and_rows_of_a_batch_share_it() -> None:
    x = torch.randn(1, 3, 4, 32, generator=torch.Generator().manual_seed(2)).expand(5, 3, 4, 32)
    y = quantize(x, "fp8", "stochastic", seed=1, layer=2, position=9)
    assert torch.equal(y, quantize(x, "fp8", "stochastic", seed=1, layer=2, position=9))
    assert all(torch.equal(row, y[0]) for row in y)
    assert not torch.equal(y, quantize(x, "fp8", "stochastic", seed=1, layer=2, position=10))
    assert torch.equal(quantize(x[0], "fp8", "stochastic", seed=1, layer=2, position=9), y[0])


def test_small_states_survive_a_scale() -> None:
    """S6: a bare E4M3 cast of a state of 5e-4 flushes it to zero; the row scale keeps it."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(1, 2, 64, 128, generator=generator) * 4e-4
    x[..., 0] = 5e-4
    y = quantize(x, "fp8")
    assert torch.allclose(y[..., 0], torch.tensor(5e-4), rtol=2**-23, atol=0)
    bare = quantize(x, "fp8-unscaled")
    assert counts(x, bare)["flushed"] == x.count_nonzero()
    assert counts(x, y)["flushed"] < 0.01 * x.numel()


@pytest.mark.parametrize("name", ROUNDED)
def test_zeros_stay_zero(name) -> None:
    """Q1: an all-zero block or tensor gives zeros, never NaN."""
    x = torch.zeros(2, 16)
    assert same_bits(quantize(x, name), x)
    x[0] = 1.0
    y = quantize(x, name)
    assert y.isfinite().all()
    assert torch.equal(y[1], torch.zeros(16))


def test_nvfp4_block_scale_underflow() -> None:
    """Q1: a block 1e-6 of the head's maximum flushes and is counted; 3e-6 survives as about 2.9e-6."""
    for small, survives in ((1e-6, False), (3e-6, True)):
        x = torch.zeros(2, 16)
        x[0, 0], x[1, 15] = 1.0, small
        y = quantize(x, "nvfp4")
        assert y.isfinite().all()
        assert counts(x, y)["flushed"] == (not survives)
        if survives:
            assert y[1, 15].item() == pytest.approx(2.9e-6, rel=0.02)


def test_e4m3_saturates_whatever_torch_does() -> None:
    assert quantize(torch.tensor([464.0, 465.0, 1000.0]), "fp8-unscaled").tolist() == [448.0] * 3


@pytest.mark.parametrize(("width", "padded"), [(100, 112), (60, 64), (1, 16)])
def test_ragged_width_equals_padding_by_hand(width, padded) -> None:
    """Q2: blocks are padded with zeros inside; what is outside the logical width never shows."""
    x = torch.randn(3, 7, width, generator=torch.Generator().manual_seed(4))
    by_hand = torch.nn.functional.pad(x, (0, padded - width))
    assert same_bits(quantize(x, "nvfp4"), quantize(by_hand, "nvfp4")[..., :width])
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert same_bits(quantize(transposed, "nvfp4"), quantize(x, "nvfp4"))
    assert quantize(x, "nvfp4", "stochastic").shape == x.shape


def test_e2m1_ties_go_to_even_and_negative_blocks_keep_their_range() -> None:
    """Q4: the scale comes from |max|, and ties round to even."""
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x = torch.tensor([values + [-v for v in values]])
    y = quantize(x, "mxfp4")
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert y.tolist() == [expected + [-v for v in expected]]
    negative = torch.tensor([[-8.0, -7, -6, -5, -4, -3, -2, -1] * 2])
    assert quantize(negative, "nvfp4").min().item() == pytest.approx(-8.0, rel=2**-4)


def test_infinity_saturates_and_nan_is_kept() -> None:
    x = torch.tensor([[1.0, torch.inf, -torch.inf, 0.5]])
    y = quantize(x, "fp8")
    assert y.isfinite().all()
    assert counts(x, y)["inf"] == 2
    assert quantize(torch.tensor([[1.0, torch.nan]]), "fp16").isnan().tolist() == [[False, True]]


def test_scopes_of_the_scale() -> None:
    x = torch.tensor([[[1.0, 100.0], [1.0, 1.0]]])
    per_row, per_head = quantize(x, "int4"), quantize(x, "int4-head")
    assert per_row[0, 1].tolist() == pytest.approx([1.0, 1.0])
    assert per_head[0, 1].tolist() == [0.0, 0.0]


def test_four_over_six_never_raises_the_error() -> None:
    x = torch.randn(8, 4, 64, generator=torch.Generator().manual_seed(5))
    plain = get_format("nvfp4")
    from dataclasses import replace

    chosen = quantize(x, replace(plain, four_over_six="mse"))
    assert ((chosen - x) ** 2).mean() < ((quantize(x, plain) - x) ** 2).mean()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: quantize(torch.zeros(4), "fp9"), "unknown format 'fp9'"),
        (lambda: quantize(torch.zeros(4), "fp8", "up"), "unknown rounding"),
        (lambda: quantize(torch.zeros(4, dtype=torch.float64), "fp8"), "float32"),
        (lambda: quantize(torch.zeros(4), "fp8", "stochastic", noise_bits=0), "noise_bits"),
        (lambda: get_format("fp8-b0"), "unknown format"),
        (lambda: parse_scheme("fp16-head@16"), "unknown format"),
    ],
)
def test_bad_calls_are_refused(call, says) -> None:
    with pytest.raises(UsageError, match=says):
        call()
