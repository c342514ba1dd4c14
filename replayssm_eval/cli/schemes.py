"""The command `schemes`."""

from .console import print_listing
from .options import Json

EPILOG = "Example: replayssm-eval schemes"


def schemes(as_json: Json = False) -> None:
    """Explain how a scheme is spelled; list its options and the presets."""
    from replayssm_emulation.scheme import OPTIONS, PRESETS, parse_scheme

    rows = [
        (text, parse_scheme(text).describe()) for text in ("fp32", "nvfp4@16", "nvfp4-rn@16", "fp8@1", "nvfp4/fp16@16")
    ]
    rows += [(name, f"{summary} = {spelled}") for name, (spelled, summary) in PRESETS.items()]
    for option, (allowed, default, summary) in OPTIONS.items():
        values = "|".join(allowed) or "1..32"
        rows.append((f"+{option}={values}", f"{summary} (default {default})"))
    print_listing(
        "Schemes: FORMAT[@L] shared, READ/RECURRENCE[@L] separate; -rn nearest, -sr stochastic; +key=value options",
        ("scheme", "what it means"),
        rows,
        as_json,
    )
