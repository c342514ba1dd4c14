"""When a state is written. A schedule is data: the sorted token positions at which the records are folded (flushes)."""

from .errors import UsageError

PROMPT_WINDOW = 16


def fixed_window(window: int, start: int, stop: int) -> list[int]:
    """Flush positions of a fixed window: every `window`-th token of [start, stop), counted from `start`.

    start is the first decoded position (the prompt's length). The token at a flush position is part of its fold.
    """
    if window < 1:
        raise UsageError(f"window L={window}: L must be at least 1")
    return list(range(start + window - 1, stop, window))


def segments(flushes: list[int], start: int, stop: int) -> list[tuple[int, int, bool]]:
    """[start, stop) cut after each flush: (first, past-last, ends in a flush) per window.

    Raises UsageError unless the flush positions are strictly increasing and inside [start, stop).
    """
    cuts, first = [], start
    for position in flushes:
        if not first <= position < stop:
            raise UsageError(f"flush position {position} is out of order or outside [{start}, {stop})")
        cuts.append((first, position + 1, True))
        first = position + 1
    if first < stop:
        cuts.append((first, stop, False))
    return cuts


def folds(flushes: list[int], prompt: int, handover: bool, start: int, stop: int) -> list[tuple[int, bool]]:
    """Folds of the tokens [start, stop) as (position, rounded), for a run whose first `prompt` tokens are a prompt.

    A prompt runs in full precision: its folds are only a way to cut it into windows, and the one at its end writes the
    copies when `handover` is on. From there on the flush positions rule.
    """
    cuts = [(p, False) for p in fixed_window(PROMPT_WINDOW, 0, prompt - 1) if p >= start]
    if prompt > start:
        cuts.append((prompt - 1, handover))
    cuts += [(p, True) for p in flushes if p >= max(prompt, start)]
    return [(p, rounded) for p, rounded in cuts if p < stop]
