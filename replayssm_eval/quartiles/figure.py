"""The picture of a quartiles run: accuracy by answer length, and the paired differences below it."""

import re
from typing import Any

import numpy as np
from replayssm_emulation import UsageError

from ..results.plotting import COLOURS, STYLE, look_of, rendered

_SPARE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe-Ito, for arms that name no format


def arm_look(name: str, role: str, number: int) -> dict[str, Any]:
    """Colour, line and mark of an arm: those of its scheme, else of the format in its name, else the next free ones."""
    if role != "scheme":
        return {
            "color": "#000000" if role == "reference" else "#888888",
            "linestyle": "-" if role == "reference" else ":",
            "marker": "s",
        }
    try:
        return look_of(name)
    except UsageError:
        words = re.findall(r"[a-z0-9]+", name.lower())
        colour = next((COLOURS[w] for w in words if w in COLOURS), _SPARE[number % len(_SPARE)])
        return {"color": colour, "linestyle": "-", "marker": "oD^vP"[number % 5]}


def shown_name(arm: dict[str, Any]) -> str:
    """Name of an arm; a control is marked where its name does not say it."""
    return arm["name"] + (" (control)" if arm["role"] == "control" and "control" not in arm["name"].lower() else "")


def length_label(cell: dict[str, Any]) -> str:
    """41–310 of a bin; a dash for an empty one."""
    if cell["lo"] is None:
        return "–"
    low, high = f"{cell['lo']:,.10g}", f"{cell['hi']:,.10g}"
    return low if low == high else f"{low}–{high}"


def quartile_figure(result: dict[str, Any]) -> dict[str, bytes]:
    """{"png", "svg"} of what quartiles.json holds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bins = result["bins"]
    ticks = [f"{length_label(b)}\nn = {b['n']}" for b in bins] + [f"all\nn = {result['reference']['overall']['n']}"]
    places = np.arange(len(ticks), dtype=float)
    places[-1] += 0.4 if bins else 0  # the overall row is not one more length
    arms = [{"role": "reference", **result["reference"]}, *result["variants"]]
    offsets = (np.arange(len(arms)) - (len(arms) - 1) / 2) * min(0.16, 0.7 / len(arms))
    with plt.rc_context(STYLE):
        figure, (top, below) = plt.subplots(
            2, 1, figsize=(1.5 * max(5, len(ticks)), 6.5), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        handles = []
        for number, (arm, offset) in enumerate(zip(arms, offsets, strict=True)):
            look = arm_look(arm["name"], arm["role"], number - 1)
            cells = [*arm["bins"], arm["overall"]]
            handles.append(_with_intervals(top, places + offset, cells, "accuracy", "wilson95", look, joined=len(bins)))
            if arm["role"] != "reference":
                _with_intervals(below, places + offset, cells, "difference", "difference_ci95", look, joined=len(bins))
        if result["control"]:
            for place, span in zip(places, [*result["control"]["range"], result["control"]["overall"]], strict=True):
                if span is not None:
                    below.fill_between(
                        [place - 0.42, place + 0.42], -span, span, color="#bbbbbb", alpha=0.35, linewidth=0
                    )
        below.axhline(0, color="black", linewidth=0.8)
        top.set(ylabel=f"{result['metric']}, 95% interval")
        below.set(ylabel="difference to the reference")
        below.set_xticks(places, ticks)
        below.set_xlabel(f"answer length of the reference, {result['length_unit']}", parse_math=False)
        # Named after creation: a legend hides names that begin with "_" and would typeset "$".
        legend = top.legend(
            handles, [str(i) for i in range(len(arms))], fontsize=8, frameon=False, loc="best", handlelength=3
        )
        for text, arm in zip(legend.get_texts(), arms, strict=True):
            text.set_parse_math(False)
            text.set_text(shown_name(arm))
        filtered = f", {result['filter']}" if result["filter"] else ""
        figure.suptitle(f"{result['task']}{filtered}: accuracy by answer length", fontsize=10, parse_math=False)
        if result["control"] and any(
            [*result["control"]["range"], result["control"]["overall"]]
        ):  # or there is nothing grey
            below.set_title(
                "grey: ± the control's difference; what lies inside is undecided",
                fontsize=7.5,
                color="#444444",
                loc="left",
            )
        return rendered(figure)


def _with_intervals(
    axes: Any, x: np.ndarray, cells: list[dict[str, Any]], key: str, interval: str, look: dict[str, Any], joined: int
) -> Any:
    """Points with bars; the first `joined` of them, the bins, are connected. Returns the handle for the legend."""
    y = np.array([np.nan if c[key] is None else c[key] for c in cells], dtype=float)
    ends = np.array([c[interval] or (np.nan, np.nan) for c in cells], dtype=float)
    axes.vlines(x, ends[:, 0], ends[:, 1], color=look["color"], linewidth=1.2)
    axes.plot(x[:joined], y[:joined], color=look["color"], linestyle=look["linestyle"], linewidth=1.0, alpha=0.7)
    face = "white" if look["linestyle"] in (":", "--") else look["color"]  # a control and separate copies: hollow marks
    marks = {"markersize": 5, "marker": look["marker"], "color": look["color"], "markerfacecolor": face}
    axes.plot(x, y, linestyle="none", **marks)
    return axes.plot([], [], linestyle=look["linestyle"], linewidth=1.0, **marks)[
        0
    ]  # for the legend: arms may differ by their line only
