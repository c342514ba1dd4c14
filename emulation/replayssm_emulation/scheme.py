"""Schemes: into what a state is rounded, when, and who reads it; their text form and its one canonical spelling.

    FORMAT[@L]                  shared copy,    e.g. nvfp4@16, fp8@1, fp16-rn@1
    READ/RECURRENCE[@L]         separate copies, e.g. nvfp4/fp16@16
    +key=value ...              options,        e.g. nvfp4/fp16@16+records=bf16
    NAME                        a preset,       e.g. vllm-fp16-sr

A format takes the suffix -rn (nearest even) or -sr (stochastic). Without one, whatever feeds the recurrence is rounded
stochastically and a read copy to nearest.
"""

from dataclasses import dataclass
from typing import Any

from .errors import UsageError
from .formats import Format, get_format

DEFAULT_WINDOW = 16
_SUFFIX = {"-rn": "nearest", "-sr": "stochastic"}


@dataclass(frozen=True)
class Copy:
    """One stored copy: a format and a rounding, "nearest" or "stochastic"."""

    format: Format
    rounding: str

    @property
    def lossy(self) -> bool:
        return self.format.element is not None


# Option: (values, default, one line). No values: a number of random bits.
OPTIONS: dict[str, tuple[tuple[str, ...], str | int, str]] = {
    "records": (
        ("model", "fp32", "bf16", "fp16"),
        "model",
        "format of the recorded v and k; `model` keeps what the model supplies",
    ),
    "fold": (("exact", "stored"), "exact", "delta rule: a flush recomputes u from raw v (exact) or folds the stored u"),
    "flush-reads": (
        ("fold", "read"),
        "fold",
        "what the flushing token reads: the unrounded fold, or the read copy and the records",
    ),
    "handover": (("on", "off"), "on", "round the prompt's fp32 state into the copies once, at the end of the prompt"),
    "cast": (
        ("fold", "chained"),
        "fold",
        "the read copy is cast from the unrounded fold, or from the rounded recurrence copy",
    ),
    "noise-bits": ((), 32, "random bits per stochastic rounding, 1 to 32 (13 mimics the hardware's fp16 conversion)"),
}


@dataclass(frozen=True)
class Scheme:
    """A parsed scheme. `read` is None for a shared copy; the remaining fields are the options above."""

    recurrence: Copy
    read: Copy | None = None
    window: int = DEFAULT_WINDOW
    records: str = "model"
    fold: str = "exact"
    flush_reads: str = "fold"
    handover: str = "on"
    cast: str = "fold"
    noise_bits: int = 32

    @property
    def lossy(self) -> bool:
        """Whether any copy or record is rounded."""
        copies = self.recurrence.lossy or (self.read is not None and self.read.lossy)
        return copies or self.records in ("bf16", "fp16")

    def __str__(self) -> str:
        recurrence = _spell(self.recurrence, "stochastic")
        text = recurrence if self.read is None else f"{_spell(self.read, 'nearest')}/{recurrence}"
        # A state that is never rounded does not depend on the window: its default needs no spelling.
        if self.read is not None or self.recurrence.lossy or self.window != DEFAULT_WINDOW:
            text += f"@{self.window}"
        for option in OPTIONS:
            value = getattr(self, option.replace("-", "_"))
            if value != OPTIONS[option][1]:
                text += f"+{option}={value}"
        return text

    def describe(self) -> str:
        """One line of plain words."""
        kind = "shared copy" if self.read is None else "separate copies"
        copies = f"{self.recurrence.format.name} ({self.recurrence.rounding})"
        if self.read is not None:
            copies = f"read {self.read.format.name} ({self.read.rounding}), recurrence {copies}"
        return f"{kind}: {copies}, written every {self.window} token{'s' if self.window > 1 else ''}"


PRESETS = {
    "replayssm": ("nvfp4/fp16@16", "ReplaySSM, two copies: 4-bit reads, fp16 recurrence, one flush per 16 tokens"),
    "replayssm-shared": ("nvfp4@16", "ReplaySSM, one 4-bit copy"),
    "vllm-fp16": ("fp16-rn@1", "vLLM decode with an fp16 state: nearest rounding at every token"),
    "vllm-fp16-sr": ("fp16@1+noise-bits=13", "vLLM decode with an fp16 state and stochastic rounding"),
}


def _spell(copy: Copy, default: str) -> str:
    if not copy.lossy or copy.rounding == default:
        return copy.format.name
    return copy.format.name + {v: k for k, v in _SUFFIX.items()}[copy.rounding]


def _parse_copy(text: str, default: str) -> Copy:
    rounding = _SUFFIX.get(text[-3:])
    name = text[:-3] if rounding else text
    copy = Copy(get_format(name), rounding or default)
    if not copy.lossy:
        if rounding:
            raise UsageError(f"{text!r}: {name} is never rounded and takes no {text[-3:]}")
        return Copy(copy.format, "nearest")
    return copy


def _parse_options(parts: list[str]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if key not in OPTIONS or not equals:
            raise UsageError(f"unknown option {part!r}: use {', '.join(f'+{o}=...' for o in OPTIONS)}")
        allowed = OPTIONS[key][0]
        field = key.replace("-", "_")
        if field in chosen:
            raise UsageError(f"option +{key} is given twice")
        if not allowed:
            if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 32):
                raise UsageError(f"+{key}={value}: use a whole number from 1 to 32")
            chosen[field] = int(value)
        elif value not in allowed:
            raise UsageError(f"+{key}={value}: use one of {', '.join(allowed)}")
        else:
            chosen[field] = value
    return chosen


def parse_scheme(text: str) -> Scheme:
    """The scheme that `text` spells; parse_scheme(str(s)) == s for every scheme s.

    Raises UsageError, one line that names the faulty part.
    """
    try:
        body, *options = PRESETS.get(text.strip(), (text.strip(),))[0].split("+")
        copies, at, window_text = body.partition("@")
        window = DEFAULT_WINDOW
        if at:
            if not (window_text.isascii() and window_text.isdigit()):
                raise UsageError(f"window {window_text!r} is not a whole number")
            window = int(window_text)
            if window < 1:
                raise UsageError(f"window L={window}: L must be at least 1")
        names = copies.split("/")
        if len(names) > 2:
            raise UsageError(f"{copies!r} names {len(names)} copies: use FORMAT or READ/RECURRENCE")
        recurrence = _parse_copy(names[-1], "stochastic")
        read = _parse_copy(names[0], "nearest") if len(names) == 2 else None
        chosen = _parse_options(options)
        if read is None and (useless := {"cast", "flush_reads"} & chosen.keys()):
            raise UsageError(f"+{min(useless).replace('_', '-')} chooses between two copies, and {copies!r} has one")
        return Scheme(recurrence, read, window, **chosen)
    except UsageError as error:
        raise UsageError(f"scheme {text!r}: {error}") from None
