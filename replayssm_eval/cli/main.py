"""The command line: registers the commands. Heavy imports happen inside them, so that --help answers at once."""

import signal
import sys
from collections.abc import Callable
from typing import Any

import typer
from replayssm_emulation.errors import RunError, UsageError

from . import accuracy, bench, formats, kl, models, quartiles, schemes

_SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda token: token.replace("_", "-")}
app = typer.Typer(
    help="How far does a model drift when its recurrent state is stored in low precision, and from which position on?",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings=_SETTINGS,
)

app.command(epilog=formats.EPILOG)(formats.formats)
app.command(epilog=schemes.EPILOG)(schemes.schemes)
app.command(epilog=kl.EPILOG)(kl.kl)
app.command(epilog=bench.EPILOG)(bench.bench)
app.command(epilog=accuracy.EPILOG)(accuracy.accuracy)
app.command(epilog=quartiles.EPILOG)(quartiles.quartiles)
app.add_typer(models.app, name="models")


def guarded(command: Callable[[], Any]) -> None:
    """Run a command: one clear line and the right exit code instead of a traceback."""
    try:
        command()
    except UsageError as error:
        print(f"replayssm-eval: {error}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"replayssm-eval: {error}", file=sys.stderr)
        sys.exit(1)


def main() -> None:
    """Entry point."""
    # A polite kill saves like Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    guarded(app)


if __name__ == "__main__":
    main()
