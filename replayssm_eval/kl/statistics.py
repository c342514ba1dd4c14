"""Position bins, quantiles, entropy buckets and intervals of per-token series."""

import itertools
import warnings
from typing import Any

import numpy as np
from scipy import stats

FIRST_BIN = 1024
QUANTILES = {
    "kl_p01": 0.01,
    "kl_p10": 0.1,
    "kl_median": 0.5,
    "kl_p90": 0.9,
    "kl_p95": 0.95,
    "kl_p99": 0.99,
    "kl_p999": 0.999,
}
ENTROPY_EDGES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0)  # nats, of the reference; the last bucket is open
_BLOCKS_PER_BIN, _SHORTEST_BLOCK, _FEWEST_BLOCKS, _FEWEST_BOOKS = 32, 64, 8, 8
_RESAMPLES = 1000


def position_bins(tokens: int, prompt: int = 0, first: int = FIRST_BIN) -> list[tuple[int, int]]:
    """[0, first), [first, 2·first), [2·first, 4·first), ... decoded tokens, as positions in [prompt, tokens).

    A prompt is read in full precision and cannot drift: position 0 of the bins is its end.
    """
    decoded, edges = tokens - prompt, [0]
    while edges[-1] < decoded:
        edges.append(min(decoded, first if len(edges) == 1 else 2 * edges[-1]))
    return [(prompt + a, prompt + b) for a, b in itertools.pairwise(edges)]


def _entropy_bucket(entropy: np.ndarray) -> np.ndarray:
    """Index of each value's half-open bucket; entropy may be -0.0 or a rounding below 0."""
    return np.digitize(np.maximum(entropy, 0), ENTROPY_EDGES[1:])


def entropy_counts(entropy: np.ndarray) -> list[int]:
    """Tokens in each entropy bucket."""
    return np.bincount(_entropy_bucket(entropy).ravel(), minlength=len(ENTROPY_EDGES)).tolist()


def interval_method(books: int) -> str:
    """How `bootstrap_mean` treats this many books, in words."""
    over = "books" if books >= _FEWEST_BOOKS else "blocks of consecutive tokens"
    return f"95% percentile bootstrap of the mean over {over}"


def mean(values: np.ndarray) -> float | None:
    """Mean of the finite values, None when there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean(dtype=np.float64)) if finite.size else None


def bootstrap_mean(series: np.ndarray) -> list[float] | None:
    """95% interval of the mean of `series` `[books, tokens]` (percentile bootstrap, fixed seed).

    Tokens of one text are autocorrelated, so whole books are resampled when there are at least 8, and otherwise blocks
    of consecutive tokens (32 per book and bin, at least 64 tokens each). None when there are fewer than 8 blocks.
    """
    books, tokens = series.shape
    length = tokens if books >= _FEWEST_BOOKS else max(_SHORTEST_BLOCK, -(-tokens // _BLOCKS_PER_BIN))
    cuts = range(0, tokens, length)
    finite = np.isfinite(series)
    clean = np.where(finite, series, 0.0).astype(np.float64)
    sums = np.add.reduceat(clean, cuts, axis=1).ravel()
    sizes = np.add.reduceat(finite, cuts, axis=1, dtype=np.int64).ravel()
    sums, sizes = sums[sizes > 0], sizes[sizes > 0]
    if len(sums) < _FEWEST_BLOCKS:
        return None
    if np.ptp(sums / sizes) == 0:
        return [float(sums[0] / sizes[0])] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        result = stats.bootstrap(
            (sums, sizes),
            lambda s, n, axis: s.sum(axis) / n.sum(axis),
            paired=True,
            vectorized=True,
            n_resamples=_RESAMPLES,
            method="percentile",
            rng=np.random.default_rng(0),
        )
    return [float(result.confidence_interval.low), float(result.confidence_interval.high)]


def row_statistics(
    kl: np.ndarray,
    same_top1: np.ndarray,
    nll: np.ndarray,
    reference_nll: np.ndarray,
    entropy: np.ndarray,
    bins: list[tuple[int, int]],
) -> dict[str, Any]:
    """The numbers of one row of `kl.json` from its per-token series, each `[books, tokens]`.

    entropy: entropy of the reference.

    Only the tokens of `bins` count. Non-finite KL values are counted and kept out of every mean and quantile.
    """
    kl, same_top1, nll, reference_nll, entropy = (
        x[:, bins[0][0] :] for x in (kl, same_top1, nll, reference_nll, entropy)
    )
    bins = [(a - bins[0][0], b - bins[0][0]) for a, b in bins]
    finite = kl[np.isfinite(kl)]
    agree = np.where(np.isnan(kl), np.nan, same_top1)
    change = nll - reference_nll
    change_mean = mean(change)
    delta_p = np.exp(-nll.astype(np.float64)) - np.exp(-reference_nll.astype(np.float64))
    square = mean(delta_p**2)
    bucket = _entropy_bucket(entropy)
    quantiles = (
        np.quantile(finite.astype(np.float64), list(QUANTILES.values())) if finite.size else [None] * len(QUANTILES)
    )
    return {
        "kl_mean": [mean(kl[:, a:b]) for a, b in bins],
        "kl_ci95": [bootstrap_mean(kl[:, a:b]) for a, b in bins],
        "kl": mean(kl),
        "kl_overall_ci95": bootstrap_mean(kl),
        **dict(zip(QUANTILES, quantiles, strict=True)),
        "kl_min": finite.min() if finite.size else None,
        "kl_max": finite.max() if finite.size else None,
        "kl_by_entropy": [mean(kl[bucket == i]) for i in range(len(ENTROPY_EDGES))],
        "negative_kl": int((finite < 0).sum()),
        "same_top1": [mean(agree[:, a:b]) for a, b in bins],
        "same_top1_overall": mean(agree),
        "nll": [mean(nll[:, a:b]) for a, b in bins],
        "nll_difference": [mean(change[:, a:b]) for a, b in bins],
        "nll_difference_overall": change_mean,
        "nll_difference_ci95": bootstrap_mean(change),
        "perplexity_ratio": None if change_mean is None else float(np.exp(change_mean)),
        "delta_p_mean": mean(delta_p),
        "delta_p_rms": None if square is None else square**0.5,
        "nonfinite": int((~np.isfinite(kl)).sum()),
    }
