"""Errors that a user causes and can mend; everything else is a bug and keeps its traceback."""


class UsageError(ValueError):
    """A bad option, scheme, format or file: one line that says what, where and what to do. The CLI exits with 2."""


class RunError(RuntimeError):
    """A run or a check that failed: one line that says what failed and where. The CLI exits with 1."""
