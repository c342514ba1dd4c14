"""Shares of right answers: intervals, the paired test and its power. All come from counts that the tables show."""

from collections.abc import Sequence

import numpy as np
from scipy import optimize, stats

ALPHA = 0.05
Z = float(stats.norm.ppf(1 - ALPHA / 2))
POWER = 0.8


def wilson(right: float, n: int) -> list[float] | None:
    """95% Wilson score interval of right / n (Wilson 1927). right may be fractional: a sum of question means, whose
    variance is at most that of single answers, so that the interval is then on the wide side. None when n is 0.
    """
    if n == 0:
        return None
    share, shrink = right / n, 1 + Z**2 / n
    middle = (share + Z**2 / (2 * n)) / shrink
    half = Z / shrink * np.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    # The ends are exact where nothing or everything is right: rounding would leave 1e-17 or 0.9999999.
    return [float(middle - half) if right > 0 else 0.0, float(middle + half) if right < n else 1.0]


def paired_difference_interval(gains: float, losses: float, n: int) -> list[float] | None:
    """95% score interval of (gains - losses) / n, the difference of two paired shares.

    It holds every difference that a score test does not reject (Tango, Statistics in Medicine 17, 1998, p. 891).
    None when n is 0.

    At difference d the share of losses q is its likeliest value under d, the larger root of
    2n q² + ((2n - gains + losses) d - gains - losses) q - losses d (1 - d) = 0, and the statistic is
    (gains - losses - n d) / sqrt(n (2q + d (1 - d))).
    """
    if n == 0:
        return None
    found = (gains - losses) / n

    def excess(d: float) -> float:  # > 0 where d is rejected
        b, c = (2 * n - gains + losses) * d - gains - losses, -losses * d * (1 - d)
        q = (np.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        return float((gains - losses - n * d) ** 2 - Z**2 * n * max(2 * q + d * (1 - d), 0.0))

    step = 1e-9  # without discordant pairs the statistic is 0/0 at the estimate itself
    low = -1.0 if found - step <= -1 else optimize.brentq(excess, -1.0, found - step)
    high = 1.0 if found + step >= 1 else optimize.brentq(excess, found + step, 1.0)
    return [float(low), float(high)]


def mcnemar(gains: int, losses: int) -> float:
    """Two-sided exact McNemar p: gains out of the discordant pairs against a fair coin; 1 without discordant pairs."""
    return min(1.0, 2 * float(stats.binom.cdf(min(gains, losses), gains + losses, 0.5)))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p values in the order given; None stays None (Scand. Journal of Statistics 6, 1979, p. 65)."""
    order = sorted((p, i) for i, p in enumerate(values) if p is not None)
    out: list[float | None] = [None] * len(values)
    running = 0.0
    for rank, (p, i) in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p))
        out[i] = running
    return out


def power(n: int, discordant: float, difference: float) -> float:
    """Probability that `mcnemar` finds p <= 5% for n pairs, a share of discordant pairs and a true difference >= 0.

    Exact sum over the number of discordant pairs. A share below the difference is impossible and is raised to it.
    """
    discordant = max(discordant, difference)
    if discordant == 0:
        return 0.0
    pairs = np.arange(n + 1)
    most = stats.binom.ppf(ALPHA / 2, pairs, 0.5)  # of the rarer kind, for the test to reject
    most = np.where(2 * stats.binom.cdf(most, pairs, 0.5) <= ALPHA, most, most - 1)
    tilt = (discordant + difference) / (2 * discordant)
    rejects = stats.binom.cdf(most, pairs, tilt) + stats.binom.sf(pairs - most - 1, pairs, tilt)
    return float((stats.binom.pmf(pairs, n, discordant) * np.where(most < 0, 0.0, rejects)).sum())


def detectable_difference(n: int, discordant: float) -> float | None:
    """Smallest true difference that one exact test at 5% (before Holm) finds with 80% probability; None where no
    difference does (n < 6).

    discordant: share of discordant pairs, as observed; where it is too small for any such difference, all discordant
    pairs are taken to point one way.
    """
    if power(n, discordant, 1.0) < POWER:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if power(n, discordant, middle) >= POWER else (middle, high)
    return high
