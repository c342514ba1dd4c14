"""The command `kl`. Heavy imports happen inside it, so that --help answers at once."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..kl.options import KlOptions
from .console import console as make_console
from .options import Config, Json, Overwrite, Quiet, takes_options

if TYPE_CHECKING:
    from ..kl.result import KlResult

EPILOG = (
    "Example: replayssm-eval kl --model tiny-mamba2 --scheme nvfp4@16 --scheme nvfp4/fp16@16 "
    "--tokens 16384 --output out"
)


@takes_options(KlOptions)
def kl(
    options: KlOptions,
    output: Annotated[Path | None, typer.Option(help="Folder for the results. Default: runs/kl-MODEL-TIME.")] = None,
    overwrite: Overwrite = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue an interrupted run of the same options. Start it if there is none."),
    ] = False,
    config: Config = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Teacher-forced KL of every scheme against fp32 state, by token position."""
    options.parsed()  # before torch is imported: a typing error should cost no wait
    from ..kl.run import run_comparison
    from ..results.progress import on_stderr

    try:
        with on_stderr(quiet) as update:
            run = run_comparison(options, output=output, overwrite=overwrite, resume=resume, progress=update)
    except KeyboardInterrupt:
        print("replayssm-eval: interrupted; finished chunks, if any, are kept for --resume", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print((run.folder / "kl.json").read_text(encoding="utf-8"), end="")
    else:
        _print_kl(run.result, run.folder)
    result = run.result
    for problem in result.problems:
        print(f"replayssm-eval: {problem}", file=sys.stderr)
    if result.status == "interrupted":
        print(
            f"replayssm-eval: interrupted after {result.tokens} tokens; "
            f"what was finished is in {run.folder}; go on with --resume",
            file=sys.stderr,
        )
        raise typer.Exit(130)
    if result.status != "complete":
        raise typer.Exit(1)


def _print_kl(result: "KlResult", folder: Path) -> None:
    from rich.table import Table
    from rich.text import Text

    from ..kl import report

    console = make_console()
    content = report.table(result, console.width)
    drawn = Table(title=content.title, title_justify="left", box=None, pad_edge=False)
    for column in content.columns:
        drawn.add_column(column, justify="left" if column == "scheme" else "right", no_wrap=True)
    for cells in content.rows:
        drawn.add_row(*map(Text, cells))
    console.print(drawn)
    if content.hidden_bins:
        console.print(f"({content.hidden_bins} bins are not shown; the report has all)")
    for line in report.reading(result):
        console.print(line, markup=False)
    print(f"figure: {folder}/kl.png   report: {folder}/report.html")
