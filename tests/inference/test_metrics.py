"""KL and its companions: hand-checked values, exact zero, infinities, blocks (cases K1, K2, K4, K6)."""

import numpy as np
import pytest
import torch

from replayssm_eval.inference import metrics
from replayssm_eval.inference.metrics import compare_hidden, compare_logits

INF, NAN = torch.inf, torch.nan


def kl(reference, row):
    """KL of one position."""
    return compare_logits(torch.tensor([[reference], [row]]), torch.tensor([0])).kl[1, 0]


def test_suppressed_tokens() -> None:
    """K1: -inf in both rows contributes nothing; -inf only in the variant is an infinite KL; undefined rows are NaN."""
    assert kl([0.0, 0.0, -INF], [0.1, 0.0, -INF]) == pytest.approx(0.00124948, rel=1e-5)
    assert kl([0.0, 0.0, 0.0], [0.1, 0.0, -INF]) == INF
    assert np.isnan(kl([0.0, 0.0, 0.0], [-INF, -INF, -INF]))
    assert np.isnan(kl([0.0, NAN, 0.0], [0.0, 0.0, 0.0]))
    assert np.isnan(kl([0.0, 0.0, 0.0], [INF, 0.0, 0.0]))
    assert kl([0.0, 0.0, -INF], [0.0, 0.0, 0.0]) == pytest.approx(np.log(1.5), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_identical_rows_give_exactly_zero(dtype) -> None:
    """K2: at a vocabulary of 248,320, in every dtype, with a huge logit among them."""
    row = torch.randn(1, 1, 248_320, generator=torch.Generator().manual_seed(0)).to(dtype)
    row[0, 0, 7] = 65504.0 if dtype == torch.float16 else 50.0
    assert compare_logits(row.expand(3, -1, -1), torch.tensor([1])).kl.tolist() == [[0.0]] * 3


def test_one_bf16_step_is_small_and_not_negative() -> None:
    row = torch.randn(1, 1, 248_320, generator=torch.Generator().manual_seed(0)).bfloat16()
    moved = row.clone()
    moved[0, 0, 5] = torch.nextafter(moved[0, 0, 5], torch.tensor(INF, dtype=torch.bfloat16))
    value = compare_logits(torch.cat([row, moved]), torch.tensor([1])).kl[1, 0]
    assert 0 < value < 1e-6


def test_undefined_rows_do_not_agree() -> None:
    found = compare_logits(torch.tensor([[[3.0, 0, 0]], [[NAN, 0, 0]]]), torch.tensor([0]))
    assert found.same_top1[:, 0].tolist() == [True, False]


def test_nll_may_fall_while_the_model_drifts() -> None:
    """K6: the observed token becomes likelier, yet the distribution is further away."""
    p, q = torch.tensor([0.4, 0.35, 0.25]).log(), torch.tensor([0.5, 0.3, 0.2]).log()
    found = compare_logits(torch.stack([p, q])[:, None], torch.tensor([0]))
    assert found.nll[:, 0].tolist() == pytest.approx([0.916, 0.693], abs=1e-3)
    assert found.kl[1, 0] == pytest.approx(0.02048, abs=1e-4)
    assert found.entropy[0, 0] == pytest.approx(
        -(0.4 * np.log(0.4) + 0.35 * np.log(0.35) + 0.25 * np.log(0.25)), rel=1e-6
    )
    assert found.same_top1.all()


def test_the_end_of_the_text_has_no_nll() -> None:
    found = compare_logits(torch.zeros(1, 2, 3), torch.tensor([1, -1]))
    assert found.nll[0, 0] == pytest.approx(np.log(3))
    assert np.isnan(found.nll[0, 1])


def test_against_float64_by_hand() -> None:
    logits = torch.randn(4, 5, 50, generator=torch.Generator().manual_seed(1))
    found = compare_logits(logits, torch.arange(5))
    p = torch.softmax(logits.double(), -1).numpy()
    for r in range(4):
        expected = (p[0] * (np.log(p[0]) - np.log(p[r]))).sum(-1)
        np.testing.assert_allclose(found.kl[r], expected, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(found.nll[r], -np.log(p[r][np.arange(5), np.arange(5)]), rtol=1e-6)


def test_blocks_bound_the_memory_and_change_nothing(monkeypatch) -> None:
    """K4: the head only ever sees a block of positions, of one row."""
    hidden, targets = torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(2)), torch.arange(40)
    head = torch.nn.Linear(8, 50)
    whole = compare_hidden(hidden, head, targets)
    sizes = []
    head.register_forward_hook(lambda _, args, __: sizes.append(tuple(args[0].shape)))
    monkeypatch.setitem(metrics.BLOCK_ELEMENTS, "cpu", 3 * 50 * 7)
    blocked = compare_hidden(hidden, head, targets)
    assert sizes == [(1, 7, 8)] * 15 + [(1, 5, 8)] * 3
    for name in ("kl", "same_top1", "nll", "entropy"):
        np.testing.assert_allclose(getattr(whole, name), getattr(blocked, name), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_hidden_states_give_exactly_zero(dtype) -> None:
    """K2: in a block of any size, with rows at every alignment in memory."""
    row = torch.randn(1, 13, 9, generator=torch.Generator().manual_seed(3), dtype=dtype)
    head = torch.nn.Linear(9, 1001, bias=False, dtype=dtype)
    found = compare_hidden(row.repeat(5, 1, 1), head, torch.arange(13))
    assert not found.kl.any()
    assert found.same_top1.all()
    assert (found.nll == found.nll[:1]).all()
