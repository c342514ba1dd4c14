"""Bins, quantiles and intervals with known answers."""

import numpy as np
import pytest

from replayssm_eval.inference.metrics import TokenMetrics
from replayssm_eval.kl.statistics import Bin, bootstrap_mean, position_bins, row_statistics


def metrics(kl, same_top1, nll, reference_nll, entropy) -> TokenMetrics:
    """A reference and one row, each `[books, tokens]`. entropy: of the reference."""
    return TokenMetrics(
        kl=np.stack([np.zeros_like(kl), kl]),
        same_top1=np.stack([np.ones_like(same_top1), same_top1]),
        nll=np.stack([reference_nll, nll]),
        entropy=np.stack([entropy, np.full_like(entropy, 99)]),
    )


@pytest.mark.parametrize(
    ("tokens", "bins"),
    [
        (100, [(0, 100)]),
        (1024, [(0, 1024)]),
        (4096, [(0, 1024), (1024, 2048), (2048, 4096)]),
        (5000, [(0, 1024), (1024, 2048), (2048, 4096), (4096, 5000)]),
    ],
)
def test_position_bins(tokens, bins) -> None:
    assert position_bins(tokens) == bins


def test_bins_count_decoded_tokens() -> None:
    assert position_bins(4000, prompt=900) == [(900, 1924), (1924, 2948), (2948, 4000)]


def test_row_statistics_by_hand() -> None:
    kl = np.array([[0.0, 1.0, 2.0, 5.0, np.inf, np.nan]], dtype=np.float32)
    top = np.array([[True, True, False, False, True, True]])
    nll, reference = np.array([[1.0, 2, 3, 4, 5, np.nan]]), np.array([[1.0, 1, 1, 1, 1, np.nan]])
    entropy = np.array([[0.1, 0.7, 0.7, 9.0, 1.5, -0.0]])
    row = row_statistics(metrics(kl, top, nll, reference, entropy), 1, [Bin(0, 3), Bin(3, 6)])
    assert row.kl_mean == [1.0, 5.0]
    assert row.kl == 2.0
    assert row.kl_median == 1.5
    assert (row.kl_min, row.kl_max, row.nonfinite, row.negative_kl) == (0.0, 5.0, 2, 0)
    assert row.same_top1 == [pytest.approx(2 / 3), 0.5]  # undefined positions do not count
    assert row.nll == [2.0, 4.5]
    assert row.nll_difference == [1.0, 3.5]
    assert row.nll_difference_overall == 2.0
    assert row.perplexity_ratio == pytest.approx(np.exp(2))
    assert row.kl_by_entropy == [0.0, 1.5, None, None, None, 5.0]
    assert row.kl_ci95 == [None, None]
    change = np.exp(-nll[0, :5]) - np.exp(-reference[0, :5])
    assert row.delta_p_mean == pytest.approx(change.mean())
    assert row.delta_p_rms == pytest.approx(np.sqrt((change**2).mean()))


def test_nothing_finite_gives_nulls_not_numbers() -> None:
    bad = np.full((1, 8), np.nan)
    row = row_statistics(metrics(bad, np.zeros((1, 8), dtype=bool), bad, bad, np.zeros((1, 8))), 1, [Bin(0, 8)])
    assert row.kl is None
    assert row.kl_p99 is None
    assert row.nll_difference_ci95 is None
    assert row.nonfinite == 8


def test_bootstrap_covers_the_mean() -> None:
    """Of 100 autocorrelated series with mean 0, the 95% interval covers 0 in about 95 (binomial: at least 85)."""
    covered = 0
    for seed in range(100):
        noise = np.random.default_rng(seed).standard_normal((1, 8192))
        smooth = np.apply_along_axis(np.convolve, 1, noise, np.ones(16) / 4, mode="same")
        low, high = bootstrap_mean(smooth)
        covered += low <= 0 <= high
    assert 85 <= covered <= 99


def test_bootstrap_edges() -> None:
    assert bootstrap_mean(np.zeros((1, 4096))) == (0.0, 0.0)
    assert bootstrap_mean(np.ones((1, 100))) is None
    series = np.random.default_rng(0).random((1, 4096))
    assert bootstrap_mean(series) == bootstrap_mean(series)
    with_gaps = series.copy()
    with_gaps[0, :1000] = np.nan
    low, high = bootstrap_mean(with_gaps)
    assert low < np.nanmean(with_gaps) < high


def test_many_books_are_resampled_whole() -> None:
    """Books that differ among themselves and not within: only a bootstrap over books sees the spread."""
    levels = np.repeat(np.arange(10.0)[:, None], 4096, axis=1)
    low, high = bootstrap_mean(levels)
    assert high - low > 2
