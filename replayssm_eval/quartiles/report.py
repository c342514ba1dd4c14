"""Tables, plain sentences and report files of a quartiles run."""

from pathlib import Path
from typing import Any

from ..results.templates import environment, picture
from .comparison import FALLS, GAIN, IN_CONTROL, LOSS, RISES, UNDECIDED
from .figure import length_label, shown_name

_TEMPLATES = Path(__file__).parent / "templates"

# Of a table; those from "cut off" on are the second half where it is too wide.
COLUMNS = (
    "length",
    "n",
    "reference [95%]",
    "this arm [95%]",
    "Δ [95%], points",
    "both",
    "won",
    "lost",
    "p",
    "Holm p",
    "cut off",
    "Δ of the rest",
    "no answer",
    "looped",
    "length ×",
    "detectable",
    "verdict",
)


def rows(result: dict[str, Any], variant: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row of `COLUMNS` per bin and one overall; counts as reference → this arm, shares in percent."""
    labels = [length_label(b) for b in result["bins"]] + ["all"]
    reference = [*result["reference"]["bins"], result["reference"]["overall"]]
    out: list[tuple[str, ...]] = []
    for label, base, cell in zip(labels, reference, [*variant["bins"], variant["overall"]], strict=True):
        ended = cell["without_truncated"]
        out.append(
            (
                label,
                str(cell["n"]) + (f" ({cell['answers']} answers)" if cell["answers"] not in (None, cell["n"]) else ""),
                _with_interval(base["accuracy"], base["wilson95"]),
                _with_interval(cell["accuracy"], cell["wilson95"]),
                _with_interval(cell["difference"], cell["difference_ci95"], sign="+"),
                _count(cell["both_right"]),
                _count(cell["gains"]),
                _count(cell["losses"]),
                _p(cell["mcnemar_p"]),
                _p(cell["holm_p"]),
                _both(base["truncated"], cell["truncated"]),
                _difference(ended),
                _both(base["not_extracted"], cell["not_extracted"]),
                _both(base["looped"], cell["looped"]),
                "–" if cell["length_ratio"] is None else f"{cell['length_ratio']:.2f}",
                _percent(cell["detectable_difference"]),
                cell["verdict"] or "–",
            )
        )
    return out


def _percent(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{100 * value:{sign}.1f}"


def _with_interval(value: float | None, interval: list[float] | None, sign: str = "") -> str:
    return _percent(value, sign) + (
        f" [{_percent(interval[0], sign)}, {_percent(interval[1], sign)}]" if interval else ""
    )


def _difference(ended: dict[str, Any] | None) -> str:
    return "–" if ended is None else f"{_percent(ended['difference'], '+')} (n {ended['n']})"


def _count(value: int | None) -> str:
    return "–" if value is None else str(value)


def _both(reference: int | None, this: int | None) -> str:
    return "–" if reference is None and this is None else f"{_count(reference)} → {_count(this)}"


def _p(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def title(result: dict[str, Any], variant: dict[str, Any]) -> str:
    """Heading of an arm's table."""
    arms = f"{shown_name(variant)} against {result['reference']['name']}"
    return f"{arms}, by the reference's answer length ({result['length_unit']})"


def reading(result: dict[str, Any], variant: dict[str, Any]) -> list[str]:
    """Plain sentences about one arm; none claims that nothing was lost."""
    name, unit = variant["name"], result["length_unit"]
    cells = [(length_label(b), c) for b, c in zip(result["bins"], variant["bins"], strict=True)] + [
        ("", variant["overall"])
    ]
    lines = []
    for label, cell in cells:
        if cell["verdict"] in (LOSS, GAIN):
            p = f"p {_p(cell['mcnemar_p'])}" if variant["role"] == "control" else f"Holm p {_p(cell['holm_p'])}"
            counts = f"{cell['losses']} of {cell['n']} questions lost, {cell['gains']} won"
            lines.append(
                f"{name}: {cell['verdict']} {_where([label], unit)}: "
                f"{_percent(cell['difference'], '+')} points ({counts}; {p})."
            )
    unclear = [(label, cell["detectable_difference"]) for label, cell in cells if cell["verdict"] == UNDECIDED]
    if unclear:
        limits = [limit for _, limit in unclear if limit is not None]
        missed = f"; a difference below {_range(limits)} points would often be missed" if limits else ""
        lines.append(
            f"{name}: not distinguishable from the reference {_where([label for label, _ in unclear], unit)}{missed}."
        )
    if ties := [label for label, cell in cells if cell["verdict"] == IN_CONTROL and not cell["gains"] + cell["losses"]]:
        lines.append(
            f"{name}: no question is lost or won {_where(ties, unit)}, as in the control; that is not proof of no loss."
        )
    if inside := [label for label, cell in cells if cell["verdict"] == IN_CONTROL and label not in ties]:
        lines.append(f"{name}: undecided {_where(inside, unit)}: no further from the reference than the control is.")
    trend = variant["trend"]
    if trend["verdict"] is not None:
        says = {
            FALLS: "falls as answers get longer",
            RISES: "rises as answers get longer",
            IN_CONTROL: "has no steeper trend with length than the control's",
            UNDECIDED: "has no trend with length that can be told from chance",
        }[trend["verdict"]]
        p = f"p {_p(trend['p'])}" + (
            f", Holm p {_p(trend['holm_p'])}" if trend["holm_p"] not in (None, trend["p"]) else ""
        )
        lines.append(
            f"{name}: the difference {says}: {_percent(trend['slope'], '+')} points per doubling of the length, {p}."
        )
    if variant["role"] == "control" and any(cell["verdict"] in (LOSS, GAIN) for _, cell in cells):
        lines.append(
            f"{name} differs from the reference by more than chance allows: "
            "find out why before you trust a difference of a scheme."
        )
    return lines


def _where(labels: list[str], unit: str) -> str:
    """at 1–5, 6–9 and 10–20 tokens and overall; "" stands for overall."""
    bins, parts = [label for label in labels if label], []
    if bins:
        parts.append("at " + (bins[0] if len(bins) == 1 else f"{', '.join(bins[:-1])} and {bins[-1]}") + f" {unit}")
    return " and ".join(parts + ["overall"] * ("" in labels))


def _range(limits: list[float]) -> str:
    low, high = f"{100 * min(limits):.1f}", f"{100 * max(limits):.1f}"
    return low if low == high else f"{low}–{high}"


def _render(template: str, result: dict[str, Any], escape: bool, **more: Any) -> str:
    arms = [
        {"title": title(result, v), "rows": rows(result, v), "reading": reading(result, v), **v}
        for v in result["variants"]
    ]
    page = environment(_TEMPLATES, escape, {"length_label": length_label, "percent": _percent}).get_template(template)
    return page.render(result=result, columns=COLUMNS, arms=arms, **more)


def quartiles_markdown(result: dict[str, Any]) -> str:
    """quartiles.md."""
    return _render("quartiles.md", result, escape=False)


def quartiles_html(result: dict[str, Any], svg: str) -> str:
    """quartiles.html: one file, figure inside. `svg` is our own drawing; everything else is escaped."""
    return _render("quartiles.html", result, escape=True, picture=picture(svg))
