"""Reports of finished runs: jinja2 templates, in which HTML is escaped."""

from pathlib import Path
from typing import Any

from ..results.plotting import thousands
from ..results.templates import environment, picture
from .figure import label

_TEMPLATES = Path(__file__).parent / "templates"


def random_note(result: dict[str, Any]) -> str:
    """A mark for every output of a run whose weights are random."""
    return " (random weights: says nothing about accuracy)" if result["model"].get("random_weights") else ""


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
        first = thousands(result["bins"][0][1] - result["bins"][0][0])
        if intervals[-1][0] > intervals[0][1]:
            how, since = "drifts further the longer the text", ""
            if (level := _level_from(intervals)) is not None:
                start = thousands(result["bins"][level][0] - result["bins"][0][0])
                how, since = "drifts early", f", with no growth since {start} that can be told from noise"
            verdict = f"{how}: {ratio:.1f} times the KL of the first {first} tokens in the last bin{since}"
        elif intervals[-1][1] < intervals[0][0]:
            verdict = f"drifts less late than early ({ratio:.2f} times)"
        else:
            verdict = f"shows no change with length that can be told from noise ({ratio:.2f} times)"
        lines.append(f"{label(row)} {verdict}.")
    return lines


def _level_from(intervals: list[list[float] | None]) -> int | None:
    """The bin where growth stops: from it on, no interval lies below that of the last bin.

    None if fewer than three bins are left, which are two doublings.
    """
    last = intervals[-1]
    assert last is not None
    below = [i for i, ci in enumerate(intervals) if ci is None or ci[1] < last[0]]
    level = below[-1] + 1 if below else 0
    return level if len(intervals) - level >= 3 else None


def _render(template: str, escape: bool, result: dict[str, Any], **more: Any) -> str:
    shared = {"label": label, "growth": growth, "random_note": random_note}
    page = environment(_TEMPLATES, escape, shared).get_template(template)
    return page.render(result=result, reading=reading(result), **more)


def kl_markdown(result: dict[str, Any]) -> str:
    """report.md of a KL run."""
    return _render("kl.md", False, result)


def kl_html(result: dict[str, Any], svg: str) -> str:
    """report.html of a KL run: one file, figure inside. `svg` is our own drawing; everything else is escaped."""
    return _render("kl.html", True, result, picture=picture(svg))
