"""What a KL run says: sentences, a table for a terminal, and pages made by jinja2, in which HTML is escaped."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..results.plotting import thousands
from ..results.templates import environment, number, picture
from .result import KlResult, RowResult
from .statistics import ENTROPY_EDGES, Interval

_TEMPLATES = Path(__file__).parent / "templates"


class Table(NamedTuple):
    """A table for a terminal. hidden_bins: how many position bins did not fit."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    hidden_bins: int


def table(result: KlResult, width: int) -> Table:
    """Mean KL by position and overall numbers of every row but the reference. width: of the terminal, in characters."""
    most = max(2, (width - 60) // 10)
    count = len(result.bins)
    # A narrow terminal shows the ends and as many bins between them as fit.
    shown = list(range(count)) if count <= most else sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
    ranges = [f"{thousands(result.bins[i].start)}–{thousands(result.bins[i].stop)}" for i in shown]
    return Table(
        title="Mean KL against fp32 state, nats per token, by position" + random_note(result),
        columns=["scheme", *ranges, "all", "p99", "same top-1", "ΔNLL"],
        rows=[_cells(row, shown) for row in result.compared],
        hidden_bins=count - len(shown),
    )


def _cells(row: RowResult, bins: Sequence[int]) -> list[str]:
    numbers = row.statistics
    return [
        row.label,
        *(number(numbers.kl_mean[i]) for i in bins),
        number(numbers.kl),
        number(numbers.kl_p99),
        number(numbers.same_top1_overall, 4),
        number(numbers.nll_difference_overall, 2),
    ]


def random_note(result: KlResult) -> str:
    """A mark for every output of a run whose weights are random."""
    return " (random weights: says nothing about accuracy)" if result.model.random_weights else ""


def reading(result: KlResult) -> list[str]:
    """Plain sentences about what the curves say. None claims more than its interval."""
    lines = [
        f"{row.label} was never rounded: its window is longer than the text."
        for row in result.schemes
        if row.flushes == 0
    ]
    if len(result.bins) < 2:
        return [*lines, "The run has one position bin, which is too short to show a trend."]
    return lines + [f"{row.label} {trend}" for row in result.schemes if (trend := _trend(row, result)) is not None]


def _trend(row: RowResult, result: KlResult) -> str | None:
    """The end of a sentence about how the KL of a row changes with length. None without intervals."""
    intervals = row.statistics.kl_ci95
    first, last, ratio = intervals[0], intervals[-1], row.growth
    if first is None or last is None or ratio is None:
        return None
    start = result.bins[0].start
    early = f"that of the first {thousands(result.bins[0].stop - start)} tokens"
    if last.low > first.high:
        times = f"Its KL in the last bin is {ratio:.1f} times {early}"
        level = _level_from(intervals)
        if level is None:
            return f"drifts further as the text gets longer. {times}."
        return (
            f"drifts early. {times}. "
            f"After {thousands(result.bins[level].start - start)} tokens it shows no growth beyond noise."
        )
    if last.high < first.low:
        return f"drifts less late than early. Its KL in the last bin is {ratio:.2f} times {early}."
    return f"shows no change with length beyond noise. Its KL in the last bin is {ratio:.2f} times {early}."


def _level_from(intervals: Sequence[Interval | None]) -> int | None:
    """The bin where growth stops: from it on, no interval lies below that of the last bin.

    None if fewer than three bins are left, which are two doublings.
    """
    last = intervals[-1]
    assert last is not None
    below = [i for i, interval in enumerate(intervals) if interval is None or interval.high < last.low]
    level = below[-1] + 1 if below else 0
    return level if len(intervals) - level >= 3 else None


def _render(template: str, escape: bool, result: KlResult, **more: Any) -> str:
    page = environment(_TEMPLATES, escape, {"random_note": random_note, "entropy_edges": ENTROPY_EDGES}).get_template(
        template
    )
    return page.render(result=result, reading=reading(result), **more)


def kl_markdown(result: KlResult) -> str:
    """report.md of a KL run."""
    return _render("kl.md", False, result)


def kl_html(result: KlResult, svg: str) -> str:
    """report.html of a KL run: one file, figure inside. `svg` is our own drawing; everything else is escaped."""
    return _render("kl.html", True, result, picture=picture(svg))
