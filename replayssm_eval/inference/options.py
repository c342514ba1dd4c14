"""Options that say how states are computed."""

from dataclasses import dataclass
from typing import Any

from ..results.options import Options, option


def schemes_option(default: tuple[str, ...], help: str) -> Any:
    """The field `schemes` of a command. help: says how its schemes are used, and the default."""
    return option(default, help, "--scheme", item=str)


@dataclass(frozen=True)
class ScanOptions(Options):
    """Which implementation computes the states."""

    backend: str = option("auto", "Which implementation of the state scan to use: auto, torch or triton.")
