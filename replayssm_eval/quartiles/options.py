"""Options of the command `quartiles`: the keywords of `run_quartiles` that decide its numbers."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from ..results.options import Options, option


@dataclass(frozen=True)
class QuartilesOptions(Options):
    """Everything that decides the numbers of a comparison. The fields are explained in `run_quartiles`."""

    reference: Path = option(  # noqa: RUF009 (option makes a field)
        MISSING,
        "lm-eval samples of the reference arm: a .jsonl or .json file, or a folder.",
        metavar="REFERENCE",
        positional=True,
    )
    variants: Sequence[Path] = option(
        (), "Samples of the arms to compare with the reference.", metavar="VARIANT...", item=Path, positional=True
    )
    controls: Sequence[str] = option(
        (),
        "The reference run again: the name of a variant, or another file or folder; repeatable. "
        "Default: arms whose name contains the word control.",
        "--control",
        metavar="NAME|PATH",
        item=str,
    )
    names: Sequence[str] = option(
        (), "Name of an arm, once for each arm in order. Default: file and folder names.", "--name", item=str
    )
    task: str | None = option(
        None, "Task, when a folder has several. A pattern such as 'math_*' pools the tasks that match."
    )
    filter_name: str | None = option(None, "lm-eval filter, when the samples have several.", "--filter")
    metric: str | None = option(
        None, "Score of a sample. Default: exact_match, or the only metric whose values are 0 and 1."
    )
    bins: int = option(4, "Number of bins of the reference's answer length.")
    tokenizer: str | None = option(
        None, "Hub id or folder of a tokenizer: counts tokens where the samples have no count."
    )
    allow_cut: bool = option(False, "Leave out a last line that is not whole.")
