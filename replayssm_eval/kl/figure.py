"""The picture of a KL run: KL, agreement and ΔNLL against position."""

from typing import Any

import numpy as np

from ..results.plotting import STYLE, look_of, rendered, thousands
from . import statistics as stats

_FIRST_BIN = 64
_MOST_WITH_QUANTILES = 6  # schemes; with more, the thin lines hide the thick ones


def label(row: dict[str, Any]) -> str:
    """Name of a row: its scheme (its role for reference and control), and its seed if that is not 0."""
    name = row["scheme"] if row["role"] == "scheme" else row["role"]
    return name if not row["seed"] else f"{name} seed {row['seed']}"


def kl_figure(result: dict[str, Any], values: dict[str, np.ndarray]) -> dict[str, bytes]:
    """{"png", "svg"} of a run.

    result: what kl.json holds. values: `[R, books, T]` of every per-token metric; bins start at 64 tokens, finer than
    those of kl.json.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    tokens, prompt = result["tokens"], result["prompt_tokens"]
    bins = stats.position_bins(tokens, prompt, _FIRST_BIN)
    middle = [np.sqrt(max(a - prompt, 16) * (b - prompt)) for a, b in bins]
    schemes = [r for r, row in enumerate(result["rows"]) if row["role"] == "scheme"]
    with plt.rc_context(STYLE):
        figure, (top, agree, nll) = plt.subplots(
            3, 1, figsize=(7.5, 8.5), sharex=True, height_ratios=(3, 1, 1), layout="constrained"
        )
        control = np.array([stats.mean(values["kl"][1][:, a:b]) or np.nan for a, b in bins])
        if np.isfinite(control).any():
            top.plot(middle, control, ":", color="black")
        ends, banded = [], False
        for r in schemes:
            row, look = result["rows"][r], look_of(result["rows"][r]["scheme"])
            series = {name: [array[r][:, a:b] for a, b in bins] for name, array in values.items()}
            means = np.array([stats.mean(k) or np.nan for k in series["kl"]])
            top.plot(middle, means, markersize=3.5, linewidth=1.8, **look)
            for quantile, width in ((0.5, 0.9), (0.9, 0.5)) if len(schemes) <= _MOST_WITH_QUANTILES else ():
                points = np.array(
                    [np.quantile(k[np.isfinite(k)], quantile) if np.isfinite(k).any() else np.nan for k in series["kl"]]
                )
                top.plot(middle, np.where(points > 0, points, np.nan), ":", color=look["color"], linewidth=width)
            bands = [(m, stats.bootstrap_mean(k)) for m, k in zip(middle, series["kl"], strict=True)]
            known = [(m, *b) for m, b in bands if b and b[0] > 0]
            if known:
                banded = True
                top.fill_between(*zip(*known, strict=True), color=look["color"], alpha=0.15, linewidth=0)
            small = {"markersize": 2.5, "linewidth": 1.2, **look}
            agree.plot(middle, [stats.mean(s.astype(float)) for s in series["same_top1"]], **small)
            change = [stats.mean(n - values["nll"][0][:, a:b]) for n, (a, b) in zip(series["nll"], bins, strict=True)]
            nll.plot(middle, np.array(change, dtype=float), **small)
            if np.isfinite(means).any():
                ends.append((means[np.isfinite(means)][-1], label(row), look["color"]))
        positive = bool(ends) or np.isfinite(control).any()
        top.set(xscale="log", yscale="log" if positive else "linear", ylabel="KL(fp32 ‖ scheme), nats per token")
        ticks = [b - prompt for _, b in bins]
        if len(ticks) > 1 and ticks[-1] < 1.5 * ticks[-2]:
            ticks.pop(-2)  # too close to the end for both labels
        top.set_xticks(ticks, [thousands(t) for t in ticks])
        top.xaxis.set_minor_locator(NullLocator())
        if positive:
            top.yaxis.set_minor_locator(LogLocator(subs=range(2, 10)))
            top.yaxis.set_minor_formatter(NullFormatter())
        if ends:
            _direct_labels(top, middle[-1], ends)
        agree.set(ylabel="same top-1")
        nll.set(ylabel="ΔNLL, nats", xlabel=f"tokens after the prompt of {prompt}" if prompt else "token position")
        nll.axhline(0, color="#999999", linewidth=0.6)
        books = ", ".join(b["title"] for b in result["corpus"]["books"])
        marked = " · RANDOM WEIGHTS" if result["model"].get("random_weights") else ""
        figure.suptitle(
            f"{result['model']['name']}{marked} · {books} · {tokens:,} tokens", fontsize=10, parse_math=False
        )
        top.set_title(
            _legend(result, banded, len(schemes) <= _MOST_WITH_QUANTILES), fontsize=7.5, color="#444444", loc="left"
        )
        return rendered(figure)


def _legend(result: dict[str, Any], banded: bool, quantiles: bool) -> str:
    kl_max = result["control"]["kl_max"]
    control = (
        "control (a second fp32 row): KL exactly 0"
        if kl_max == 0
        else f"control (black, dotted): KL at most {kl_max:.1e}"
    )
    drawn = "thick: mean" + (", band: 95% interval where 8 blocks or more allow one" if banded else "")
    drawn += "; thin dotted: median and 90th percentile" if quantiles else ""
    return (
        f"solid: one shared copy, dashed: separate copies; ● stochastic, ▼ nearest recurrence copy\n{drawn}\n{control}"
    )


def _direct_labels(axes: Any, x: float, ends: list[tuple[float, str, str]]) -> None:
    """Names at the right end of the curves, pushed apart where they would touch."""
    low, high = np.log10(axes.get_ylim())
    gap, last = (high - low) / 28, -np.inf
    for y, name, colour in sorted(ends):
        last = max(np.log10(y), last + gap)
        place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate(name, (x, 10**last), fontsize=8, color=colour, parse_math=False, **place)
