"""Progress on stderr: a bar on a terminal, a line per chunk elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Progress:
    """One finished chunk: the book it is from, tokens done and to do in the whole run, mean KL of each scheme in it."""

    book: str
    done: int
    total: int
    kl: dict[str, float]

    def running(self) -> str:
        return "KL of this chunk: " + "  ".join(f"{name} {value:.2g}" for name, value in self.kl.items())


class OnProgress(Protocol):
    """What a run calls after every chunk."""

    def __call__(self, progress: Progress, /) -> Any: ...


def silent(_: Progress) -> None:
    """Report nothing."""


@contextmanager
def on_stderr(quiet: bool = False) -> Iterator[OnProgress]:
    """A `OnProgress` for people; `quiet` for none."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield silent
    elif console.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task("loading", total=None)
            # A second line for the numbers: beside the bar they would push it off a narrow terminal.
            numbers = bar.add_task("", total=None, visible=False)

            def update(p: Progress) -> None:
                bar.update(task, description=p.book, completed=p.done, total=p.total)
                bar.update(numbers, description=p.running(), visible=True)

            yield update
    else:
        started, first = time.monotonic(), None

        def line(p: Progress) -> None:
            nonlocal started, first
            # The first chunk pays for start-up (and a resumed run begins late): the rest is timed from its end.
            eta = (
                ""
                if first is None
                else f"  ETA {(time.monotonic() - started) / (p.done - first) * (p.total - p.done):.0f} s"
            )
            if first is None:
                started, first = time.monotonic(), p.done
            print(f"{p.book}: {p.done}/{p.total} tokens{eta}  {p.running()}", file=sys.stderr, flush=True)

        yield line
