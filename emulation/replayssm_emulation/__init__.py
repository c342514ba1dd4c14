"""What a low-precision recurrent state is: formats, rounding, schemes, schedules and the reference recurrence."""

from .errors import RunError, UsageError
from .formats import FORMATS, Format, get_format
from .philox import philox4x32, state_noise
from .quantize import counts, quantize, quantize_with_noise
from .recurrence import NoiseKey, recurrence_steps, recurrence_windows
from .schedule import fixed_window
from .scheme import PRESETS, Copy, Scheme, parse_scheme

__all__ = [
    "FORMATS",
    "PRESETS",
    "Copy",
    "Format",
    "NoiseKey",
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
