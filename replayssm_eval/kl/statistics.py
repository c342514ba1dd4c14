"""Position bins, quantiles, entropy buckets and intervals of per-token series."""

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import DegenerateDataWarning, bootstrap

from ..inference.metrics import TokenMetrics

FIRST_BIN = 1024
_QUANTILES = {
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


class Interval(NamedTuple):
    """A 95% interval."""

    low: float
    high: float


class Bin(NamedTuple):
    """Token positions [start, stop) of a text."""

    start: int
    stop: int


@dataclass(frozen=True)
class RowStatistics:
    """The numbers of one row, over all tokens after the prompt. None: no finite value, or too few for an interval.

    KL, NLL and entropy are in nats per token. Lists have one entry per position bin; `kl_by_entropy` has one per bucket
    of the reference's entropy. Means and quantiles are over finite values.

    kl_mean, kl_ci95: mean and its 95% interval by bin. kl, kl_overall_ci95: the same over all bins.
    kl_p01 ... kl_p999: quantiles. negative_kl, nonfinite: counts of tokens.
    same_top1: share of tokens whose most likely next token is the reference's.
    nll_difference: NLL of the row minus the reference's. perplexity_ratio: exp of its mean.
    delta_p_mean, delta_p_rms: change of the probability of the text's next token.
    """

    kl_mean: list[float | None]
    kl_ci95: list[Interval | None]
    kl: float | None
    kl_overall_ci95: Interval | None
    kl_p01: float | None
    kl_p10: float | None
    kl_median: float | None
    kl_p90: float | None
    kl_p95: float | None
    kl_p99: float | None
    kl_p999: float | None
    kl_min: float | None
    kl_max: float | None
    kl_by_entropy: list[float | None]
    negative_kl: int
    same_top1: list[float | None]
    same_top1_overall: float | None
    nll: list[float | None]
    nll_difference: list[float | None]
    nll_difference_overall: float | None
    nll_difference_ci95: Interval | None
    perplexity_ratio: float | None
    delta_p_mean: float | None
    delta_p_rms: float | None
    nonfinite: int


def position_bins(tokens: int, prompt: int = 0, first: int = FIRST_BIN) -> list[Bin]:
    """[0, first), [first, 2·first), [2·first, 4·first), ... decoded tokens, as positions in [prompt, tokens).

    The bins start at the end of the prompt. A prompt is read in full precision and cannot drift.
    """
    decoded, edges = tokens - prompt, [0]
    while edges[-1] < decoded:
        edges.append(min(decoded, first if len(edges) == 1 else 2 * edges[-1]))
    return [Bin(prompt + a, prompt + b) for a, b in itertools.pairwise(edges)]


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


def bootstrap_mean(series: np.ndarray) -> Interval | None:
    """95% interval of the mean of `series` `[books, tokens]` (percentile bootstrap, fixed seed).

    Tokens of one text are autocorrelated. Whole books are resampled when there are at least 8. Otherwise blocks of
    consecutive tokens are (32 per book and bin, at least 64 tokens each). None when there are fewer than 8 blocks.
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
        value = float(sums[0] / sizes[0])
        return Interval(value, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)
        result = bootstrap(
            (sums, sizes),
            lambda s, n, axis: s.sum(axis) / n.sum(axis),
            paired=True,
            vectorized=True,
            n_resamples=_RESAMPLES,
            method="percentile",
            rng=np.random.default_rng(0),
        )
    return Interval(float(result.confidence_interval.low), float(result.confidence_interval.high))


def row_statistics(metrics: TokenMetrics, row: int, bins: Sequence[Bin]) -> RowStatistics:
    """The numbers of row `row`, over the tokens of `bins`.

    metrics: arrays `[R, books, tokens]`; row 0 is the reference.
    Non-finite KL values are counted and kept out of every mean and quantile.
    """
    start = bins[0].start
    kl, same_top1, nll = (values[row][:, start:] for values in (metrics.kl, metrics.same_top1, metrics.nll))
    reference_nll, entropy = metrics.nll[0][:, start:], metrics.entropy[0][:, start:]
    finite = kl[np.isfinite(kl)]
    agree = np.where(np.isnan(kl), np.nan, same_top1)
    change = nll - reference_nll
    change_mean = mean(change)
    delta_p = np.exp(-nll.astype(np.float64)) - np.exp(-reference_nll.astype(np.float64))
    square = mean(delta_p**2)
    bucket = _entropy_bucket(entropy)

    def by_bin(values: np.ndarray) -> list[float | None]:
        return [mean(values[:, a - start : b - start]) for a, b in bins]

    return RowStatistics(
        kl_mean=by_bin(kl),
        kl_ci95=[bootstrap_mean(kl[:, a - start : b - start]) for a, b in bins],
        kl=mean(kl),
        kl_overall_ci95=bootstrap_mean(kl),
        **_quantiles(finite),
        kl_min=float(finite.min()) if finite.size else None,
        kl_max=float(finite.max()) if finite.size else None,
        kl_by_entropy=[mean(kl[bucket == i]) for i in range(len(ENTROPY_EDGES))],
        negative_kl=int((finite < 0).sum()),
        same_top1=by_bin(agree),
        same_top1_overall=mean(agree),
        nll=by_bin(nll),
        nll_difference=by_bin(change),
        nll_difference_overall=change_mean,
        nll_difference_ci95=bootstrap_mean(change),
        perplexity_ratio=None if change_mean is None else float(np.exp(change_mean)),
        delta_p_mean=mean(delta_p),
        delta_p_rms=None if square is None else square**0.5,
        nonfinite=int((~np.isfinite(kl)).sum()),
    )


def _quantiles(finite: np.ndarray) -> dict[str, float | None]:
    if not finite.size:
        return dict.fromkeys(_QUANTILES)
    values = np.quantile(finite.astype(np.float64), list(_QUANTILES.values()))
    return dict(zip(_QUANTILES, values.tolist(), strict=True))
