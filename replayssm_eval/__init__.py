"""Accuracy and numerical-error evaluation of low-precision recurrent state.

from replayssm_eval import attach, run_kl
"""

from typing import Any

__all__ = ["__version__", "attach", "run_kl"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when they are used: the command line's --help should answer at once."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("replayssm-eval")
        except PackageNotFoundError:
            return "source"  # a source tree that is not installed; `provenance` says the same
    if name == "attach":
        from .inference.attach import attach

        return attach
    if name == "run_kl":
        from .kl.run import run_kl

        return run_kl
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("replayssm-eval")
        except metadata.PackageNotFoundError:  # a source tree that is not installed
            return "0+source"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
