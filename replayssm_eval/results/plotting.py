"""What the figures of all commands share: colours, lines, marks and the way into a file."""

import colorsys
import io
from typing import Any

from replayssm_emulation import parse_scheme

# Okabe-Ito: distinguishable with every common kind of colour blindness. A format keeps its colour in every figure.
COLOURS = {
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
#: Matplotlib settings. Equal figures give equal SVG files, with text as text.
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "replayssm-eval",
    "svg.fonttype": "none",
}


def thousands(value: int) -> str:
    """1024 -> 1K; other numbers as they are."""
    return f"{value // 1024}K" if value >= 1024 and value % 1024 == 0 else str(value)


def look_of(scheme: str) -> dict[str, Any]:
    """Colour by the format that tokens read, line by copies, mark by rounding.

    Lines are solid for a shared copy, dashed for separate copies, dash-dotted for a copy rounded at every token.
    """
    parsed = parse_scheme(scheme)
    name = (parsed.read or parsed.recurrence).format.name
    matches = [known for known in COLOURS if name == known or name.startswith(known + "-")]
    colour = COLOURS[max(matches, key=len)] if matches else "#555555"
    nearest = parsed.recurrence.lossy and parsed.recurrence.rounding == "nearest"
    if nearest:  # a darker shade, so that rounding can be told without the marks
        red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
        colour = "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(hue, 0.6 * light, saturation))
    line = "--" if parsed.read else "-." if parsed.window == 1 else "-"
    return {"color": colour, "linestyle": line, "marker": "v" if nearest else "o"}


def rendered(figure: Any) -> dict[str, bytes]:
    """The bytes of a finished figure as "png" and "svg", the same every time. Closes the figure.

    Call it inside the figure's rc context.
    """
    import matplotlib.pyplot as plt

    out = {}
    for kind in ("png", "svg"):
        sink = io.BytesIO()
        figure.savefig(sink, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
        out[kind] = sink.getvalue()
    plt.close(figure)
    return out
