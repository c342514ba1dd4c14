"""What a low-precision recurrent state is: formats, rounding, schemes, schedules and the reference recurrence."""

import importlib
from typing import TYPE_CHECKING, Any

from .errors import RunError, UsageError
from .formats import FORMATS, Format, get_format
from .rule import Rule
from .schedule import fixed_window
from .scheme import PRESETS, Copy, Scheme, parse_scheme

if TYPE_CHECKING:
    from .philox import philox4x32, state_noise
    from .quantizer import counts, quantize, quantize_with_noise
    from .recurrence import NoiseKey, recurrence_steps, recurrence_windows

__all__ = [
    "FORMATS",
    "PRESETS",
    "Copy",
    "Format",
    "NoiseKey",
    "Rule",
    "RunError",
    "Scheme",
    "UsageError",
    "counts",
    "fixed_window",
    "get_format",
    "parse_scheme",
    "philox4x32",
    "quantize",
    "quantize_with_noise",
    "recurrence_steps",
    "recurrence_windows",
    "state_noise",
]

_NEEDS_TORCH = {
    "philox": ("philox4x32", "state_noise"),
    "quantizer": ("counts", "quantize", "quantize_with_noise"),
    "recurrence": ("NoiseKey", "recurrence_steps", "recurrence_windows"),
}


def __getattr__(name: str) -> Any:
    """Import torch only when something needs it: schemes and formats are read by command lines that should be quick."""
    for module, names in _NEEDS_TORCH.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
