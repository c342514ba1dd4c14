"""Figures and reports of finished runs: matplotlib for the picture, jinja2 for the text (HTML is escaped)."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from replayssm_emulation import parse_scheme

from . import stats

# Okabe-Ito: distinguishable with every common kind of colour blindness. A format keeps its colour in every figure.
_COLOURS = {
    "nvfp4": "#D55E00",
    "mxfp4": "#E69F00",
    "int4": "#8C510A",
    "mxfp6": "#F0E442",
    "fp8": "#0072B2",
    "mxfp8": "#56B4E9",
    "int8": "#009E73",
    "int16": "#66A61E",
    "fp16": "#CC79A7",
    "bf16": "#7570B3",
    "fp32": "#000000",
}
_FIGURE_FIRST_BIN = 64


def _colour(scheme: str) -> str:
    base = scheme.split("@")[0].split("/")[0]
    matches = [name for name in _COLOURS if base == name or base.startswith(name + "-")]
    return _COLOURS[max(matches, key=len)] if matches else "#555555"


def _style(scheme: str) -> str:
    """Separate copies are dashed, a per-token state is dash-dotted, a shared window is solid."""
    parsed = parse_scheme(scheme)
    return "--" if parsed.read else "-." if parsed.window == 1 else "-"


def label(row: dict[str, Any]) -> str:
    """Name of a row: its scheme (its role for reference and control), and its seed if that is not 0."""
    name = row["scheme"] if row["role"] == "scheme" else row["role"]
    return name if not row["seed"] else f"{name} seed {row['seed']}"


def kl_figure(result: dict[str, Any], values: dict[str, np.ndarray]) -> dict[str, bytes]:
    """{"png", "svg"} of KL, same-top-1 and ΔNLL against position.

    values: `[R, books, T]` of every per-token metric; bins start at 64 tokens, finer than those of kl.json.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    prompt = result["prompt_tokens"]
    bins = stats.position_bins(result["tokens"], prompt, _FIGURE_FIRST_BIN)
    middle = [np.sqrt(max(a - prompt, 16) * (b - prompt)) for a, b in bins]
    tokens = result["tokens"]
    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "replayssm-eval",
        "svg.fonttype": "none",
        "text.parse_math": False,
    }
    with plt.rc_context(style):
        figure, (top, agree, nll) = plt.subplots(3, 1, figsize=(7.5, 8.5), sharex=True, height_ratios=(3, 1, 1), layout="constrained")
        ends = []
        for r, row in enumerate(result["rows"]):
            if row["role"] == "reference":
                continue
            series = {name: [array[r][:, a:b] for a, b in bins] for name, array in values.items()}
            means = np.array([stats.mean(k) or np.nan for k in series["kl"]])
            if row["role"] == "control":
                if np.nanmax(np.append(means, 0)) > 0:
                    top.plot(middle, means, ":", color="black", label="control")
                continue
            colour, line = _colour(row["scheme"]), _style(row["scheme"])
            marker = "v" if "-rn" in row["scheme"] else "o"
            top.plot(middle, means, line, color=colour, marker=marker, markersize=3.5, linewidth=1.8)
            for quantile, width in ((0.5, 0.7), (0.9, 0.5)):
                points = [np.quantile(k[np.isfinite(k)], quantile) if np.isfinite(k).any() else np.nan for k in series["kl"]]
                top.plot(middle, np.where(np.array(points) > 0, points, np.nan), ":", color=colour, linewidth=width)
            bands = [(m, stats.bootstrap_mean(k)) for m, k in zip(middle, series["kl"], strict=True)]
            known = [(m, *b) for m, b in bands if b and b[0] > 0]
            if known:
                top.fill_between(*zip(*known, strict=True), color=colour, alpha=0.15, linewidth=0)
            agree.plot(
                middle,
                [stats.mean(s.astype(float)) for s in series["same_top1"]],
                line,
                color=colour,
                marker=marker,
                markersize=2.5,
                linewidth=1.2,
            )
            change = [stats.mean(n - values["nll"][0][:, a:b]) for n, (a, b) in zip(series["nll"], bins, strict=True)]
            nll.plot(middle, np.array(change, dtype=float), line, color=colour, marker=marker, markersize=2.5, linewidth=1.2)
            positive = np.flatnonzero(means > 0)
            if positive.size:
                ends.append((means[positive[-1]], label(row), colour))
        top.set(xscale="log", yscale="log" if ends else "linear", ylabel="KL(fp32 ‖ scheme), nats per token")
        ends_of_bins = [b - prompt for _, b in bins]
        top.set_xticks(ends_of_bins, [thousands(b) for b in ends_of_bins])
        top.minorticks_off()
        if ends:
            _direct_labels(top, middle[-1], ends)
        control = result["control"]["kl_max"]
        note = "control (a second fp32 row): KL exactly 0" if control == 0 else f"control (dotted): KL at most {control:.1e}"
        top.text(
            0.01,
            0.98,
            f"{note}\nthick: mean with 95% band; dotted: median, 90th percentile",
            transform=top.transAxes,
            va="top",
            fontsize=7.5,
            color="#444444",
        )
        agree.set(ylabel="same top-1")
        nll.set(ylabel="ΔNLL, nats", xlabel=f"tokens after the prompt of {prompt}" if prompt else "token position")
        nll.axhline(0, color="#999999", linewidth=0.6)
        books = ", ".join(b["title"] for b in result["corpus"]["books"])
        figure.suptitle(f"{result['model']['name']} · {books} · {tokens:,} tokens", fontsize=10)
        out = {}
        for kind in ("png", "svg"):
            sink = io.BytesIO()
            figure.savefig(sink, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
            out[kind] = sink.getvalue()
        plt.close(figure)
    return out


def thousands(value: int) -> str:
    return f"{value // 1024}K" if value >= 1024 and value % 1024 == 0 else str(value)


def _direct_labels(axes: Any, x: float, ends: list[tuple[float, str, str]]) -> None:
    """Names at the right end of the curves, pushed apart where they would touch."""
    low, high = np.log10(axes.get_ylim())
    gap, last = (high - low) / 28, -np.inf
    for y, name, colour in sorted(ends):
        place = max(np.log10(y), last + gap)
        last = place
        axes.annotate(
            name, (x, 10**place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8, color=colour, annotation_clip=False
        )


def growth(row: dict[str, Any]) -> float | None:
    """Mean KL of the last position bin over that of the first."""
    first, last = row["kl_mean"][0], row["kl_mean"][-1]
    return last / first if first and last is not None and len(row["kl_mean"]) > 1 else None


def reading(result: dict[str, Any]) -> list[str]:
    """Plain sentences about what the curves say; none claims more than its interval."""
    lines = []
    for row in result["rows"]:
        if row["role"] == "scheme" and row["flushes"] == 0:
            lines.append(f"{label(row)} was never rounded: its window is longer than the text.")
    if len(result["bins"]) < 2:
        return [*lines, "The run is too short to show a trend: it has one position bin."]
    for row in result["rows"]:
        intervals = row["kl_ci95"]
        if row["role"] != "scheme" or row["kl_mean"][0] is None or intervals[0] is None or intervals[-1] is None:
            continue
        ratio = growth(row)
        if ratio is None:
            continue
        if intervals[-1][0] > intervals[0][1]:
            verdict = f"drifts further the longer the text: {ratio:.1f} times the KL of the first {thousands(result['bins'][0][1] - result['bins'][0][0])} tokens in the last bin"
        elif intervals[-1][1] < intervals[0][0]:
            verdict = f"drifts less late than early ({ratio:.2f} times)"
        else:
            verdict = f"shows no growth that can be told from noise ({ratio:.2f} times)"
        lines.append(f"{label(row)} {verdict}.")
    return lines


def _environment(escape: bool) -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=escape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["number"] = number
    environment.filters["thousands"] = thousands
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    environment.globals.update(label=label, growth=growth)
    return environment


def number(value: float | None, digits: int = 3) -> str:
    """A figure for a table: `digits` significant digits, a dash for nothing."""
    return "–" if value is None else "0" if value == 0 else f"{value:.{digits}g}"


def kl_markdown(result: dict[str, Any]) -> str:
    """report.md of a KL run."""
    return _environment(escape=False).get_template("kl.md").render(result=result, reading=reading(result))


def kl_html(result: dict[str, Any], svg: str) -> str:
    """report.html of a KL run: one file, figure inside. `svg` is our own drawing; everything else is escaped."""
    import markupsafe

    picture = markupsafe.Markup(svg[svg.index("<svg") :])
    return _environment(escape=True).get_template("kl.html").render(result=result, reading=reading(result), picture=picture)
