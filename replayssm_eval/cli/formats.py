"""The command `formats`."""

from typing import Any

from .console import print_listing
from .options import Json

EPILOG = "Example: replayssm-eval formats --json"


def formats(as_json: Json = False) -> None:
    """List the number formats that a state can be stored in."""
    from replayssm_emulation.formats import FORMATS

    rows: list[tuple[Any, ...]] = [(f.name, round(f.bits_per_element(64, 128), 3), f.summary) for f in FORMATS.values()]
    rows += (
        []
        if as_json
        else [
            ("NAME-head, NAME-bN", "", "fp8, fp8-e5m2 and int formats: one scale per head, or per N elements of a row"),
            ("NAME-unscaled", "", "fp8 and fp8-e5m2: a bare cast without a scale"),
            ("NAME-even, NAME-rceil", "", "mx formats: other scale rules"),
        ]
    )
    print_listing(
        "Formats (bits per element of a 64 x 128 head, scales included)",
        ("format", "bits", "what it is"),
        rows,
        as_json,
    )
