"""When a state is written. A schedule is data: the sorted token positions at which the records are folded (flushes)."""

from .errors import UsageError


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
