"""Whether an answer ended in a loop."""

_UNIT, _LONGEST_UNIT, _COPIES = 20, 1000, 5
LOOP_RULE = (
    f"the answer ends in {_COPIES} or more copies in a row of one stretch of {_UNIT} to {_LONGEST_UNIT} characters"
)


def loops(text: str) -> bool:
    """Whether the answer ended in a loop, by `LOOP_RULE`. White space at the end does not count.

    The last copy may be broken off. A list that counts ("Step 7: ...") is no loop. A loop before the end is not seen.
    """
    return _ends_periodic(text) or _ends_periodic(text.rstrip())


def _ends_periodic(text: str) -> bool:
    if len(text) < _UNIT * _COPIES:
        return False
    end, at = text[-_UNIT:], len(text) - _UNIT
    while (at := text.rfind(end, max(0, len(text) - _UNIT - _LONGEST_UNIT), at + _UNIT - 1)) >= 0:
        period = len(text) - _UNIT - at
        span = period * (_COPIES - 1)
        if _UNIT <= period <= len(text) // _COPIES and text[-span:] == text[-span - period : -period]:
            return True
    return False
