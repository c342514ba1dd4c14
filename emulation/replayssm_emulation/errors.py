"""Errors that a user causes and can mend; everything else is a bug and keeps its traceback."""

from importlib.util import find_spec


class UsageError(ValueError):
    """A bad option, scheme, format or file: one line that says what, where and what to do. The CLI exits with 2."""


class RunError(RuntimeError):
    """A run or a check that failed: one line that says what failed and where. The CLI exits with 1."""


def require(module: str, extra: str, wanted_by: str) -> None:
    """Raises UsageError when the optional package `module` is missing; the message names the extra that installs it.

    wanted_by: the command or option that needs the package; the message begins with it.
    """
    if find_spec(module) is None:
        raise UsageError(f"{wanted_by} needs the package {module}: pip install 'replayssm-eval[{extra}]'")
