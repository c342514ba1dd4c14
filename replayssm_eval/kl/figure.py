"""The picture of a KL run: KL, agreement and ΔNLL against position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..inference.metrics import TokenMetrics
from ..results.plotting import STYLE, look_of, rendered, thousands
from .result import KlResult
from .statistics import Bin, bootstrap_mean, mean, position_bins

_FIRST_BIN = 64
_MOST_WITH_QUANTILES = 6  # schemes; with more, the thin lines hide the thick ones


@dataclass(frozen=True)
class _End:
    """Where a curve ends, for its name."""

    y: float
    label: str
    colour: str


def kl_figure(result: KlResult, metrics: TokenMetrics) -> dict[str, bytes]:
    """{"png", "svg"} of a run.

    metrics: arrays `[R, books, T]`. Bins start at 64 tokens: they are finer than those of kl.json.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    prompt = result.prompt_tokens
    bins = position_bins(result.tokens, prompt, _FIRST_BIN)
    middle = [np.sqrt(max(a - prompt, 16) * (b - prompt)) for a, b in bins]
    with plt.rc_context(STYLE):
        figure, (top, agree, nll) = plt.subplots(
            3, 1, figsize=(7.5, 8.5), sharex=True, height_ratios=(3, 1, 1), layout="constrained"
        )
        control = np.array([mean(metrics.kl[1][:, a:b]) or np.nan for a, b in bins])
        if np.isfinite(control).any():
            top.plot(middle, control, ":", color="black")
        quantiles = len(result.schemes) <= _MOST_WITH_QUANTILES
        ends, banded = [], False
        for index, row in enumerate(result.rows):
            if row.role != "scheme":
                continue
            look = look_of(row.scheme)
            kl = [metrics.kl[index][:, a:b] for a, b in bins]
            means = np.array([mean(values) or np.nan for values in kl])
            top.plot(middle, means, markersize=3.5, linewidth=1.8, **look)
            if quantiles:
                _draw_quantiles(top, middle, kl, look["color"])
            banded |= _draw_intervals(top, middle, kl, look["color"])
            _draw_agreement(agree, middle, metrics.same_top1[index], bins, look)
            _draw_nll_change(nll, middle, metrics.nll[index] - metrics.nll[0], bins, look)
            if np.isfinite(means).any():
                ends.append(_End(means[np.isfinite(means)][-1], row.label, look["color"]))
        _finish_axes(top, bins, prompt, positive=bool(ends) or bool(np.isfinite(control).any()))
        if ends:
            _label_ends(top, middle[-1], ends)
        agree.set(ylabel="same top-1")
        nll.set(ylabel="ΔNLL, nats", xlabel=f"tokens after the prompt of {prompt}" if prompt else "token position")
        nll.axhline(0, color="#999999", linewidth=0.6)
        figure.suptitle(_title(result), fontsize=10, parse_math=False)
        top.set_title(legend(result, banded, quantiles), fontsize=7.5, color="#444444", loc="left")
        return rendered(figure)


def _draw_quantiles(axes: Any, middle: Sequence[float], kl: Sequence[np.ndarray], colour: str) -> None:
    """Median and 90th percentile of every bin."""
    for quantile, width in ((0.5, 0.9), (0.9, 0.5)):
        points = np.array([np.quantile(k[np.isfinite(k)], quantile) if np.isfinite(k).any() else np.nan for k in kl])
        axes.plot(middle, np.where(points > 0, points, np.nan), ":", color=colour, linewidth=width)


def _draw_intervals(axes: Any, middle: Sequence[float], kl: Sequence[np.ndarray], colour: str) -> bool:
    """A band of the means' intervals. Returns whether any bin has one that a logarithmic axis can show."""
    intervals = [(x, bootstrap_mean(values)) for x, values in zip(middle, kl, strict=True)]
    band = [(x, *interval) for x, interval in intervals if interval and interval.low > 0]
    if band:
        axes.fill_between(*zip(*band, strict=True), color=colour, alpha=0.15, linewidth=0)
    return bool(band)


def _draw_agreement(
    axes: Any, middle: Sequence[float], same_top1: np.ndarray, bins: Sequence[Bin], look: dict[str, Any]
) -> None:
    shares = [mean(same_top1[:, a:b].astype(float)) for a, b in bins]
    axes.plot(middle, shares, **{"markersize": 2.5, "linewidth": 1.2, **look})


def _draw_nll_change(
    axes: Any, middle: Sequence[float], change: np.ndarray, bins: Sequence[Bin], look: dict[str, Any]
) -> None:
    means = np.array([mean(change[:, a:b]) for a, b in bins], dtype=float)
    axes.plot(middle, means, **{"markersize": 2.5, "linewidth": 1.2, **look})


def _finish_axes(axes: Any, bins: Sequence[Bin], prompt: int, positive: bool) -> None:
    """Scales and ticks of the KL. positive: whether there is a value that a logarithmic axis can show."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    axes.set(xscale="log", yscale="log" if positive else "linear", ylabel="KL(fp32 ‖ scheme), nats per token")
    ticks = [b - prompt for _, b in bins]
    if len(ticks) > 1 and ticks[-1] < 1.5 * ticks[-2]:
        ticks.pop(-2)  # too close to the end for both labels
    axes.set_xticks(ticks, [thousands(t) for t in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    if positive:
        axes.yaxis.set_minor_locator(LogLocator(subs=range(2, 10)))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _title(result: KlResult) -> str:
    books = ", ".join(book.title for book in result.corpus.books)
    marked = " · RANDOM WEIGHTS" if result.model.random_weights else ""
    return f"{result.model.name}{marked} · {books} · {result.tokens:,} tokens"


def legend(result: KlResult, banded: bool, quantiles: bool) -> str:
    """What lines and marks mean. banded, quantiles: whether intervals and quantiles are drawn."""
    kl_max = result.control.statistics.kl_max
    control = "has a KL of exactly 0" if kl_max == 0 else f"(black, dotted) has a KL of at most {kl_max:.1e}"
    drawn = "Thick line: mean." + (" Band: 95% interval of the mean." if banded else "")
    drawn += " Thin dotted lines: median and 90th percentile." if quantiles else ""
    return (
        "Solid: one shared copy. Dashed: separate copies. Dash-dotted: a shared copy rounded at every token.\n"
        "Colour: the format that is read. Mark: rounding of the recurrence copy, ● stochastic or ▼ nearest.\n"
        f"{drawn}\nThe control, a second fp32 row, {control}."
    )


def _label_ends(axes: Any, x: float, ends: Sequence[_End]) -> None:
    """Names at the right end of the curves, pushed apart where they would touch."""
    low, high = np.log10(axes.get_ylim())
    gap, last = (high - low) / 28, -np.inf
    for end in sorted(ends, key=lambda end: (end.y, end.label)):
        last = max(np.log10(end.y), last + gap)
        place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate(end.label, (x, 10**last), fontsize=8, color=end.colour, parse_math=False, **place)
