"""The command `quartiles`. Heavy imports happen inside it, so that --help answers at once."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..quartiles.options import QuartilesOptions
from .console import console as make_console
from .options import Config, Json, Overwrite, takes_options

_WIDE = 210  # columns of a terminal that holds the whole table
EPILOG = (
    "Example: replayssm-eval quartiles runs/fp32 runs/nvfp4 --control runs/fp32-again "
    "--filter strict-match --output out"
)


@takes_options(QuartilesOptions)
def quartiles(
    options: QuartilesOptions,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results. Default: runs/quartiles-TASK-TIME.")
    ] = None,
    overwrite: Overwrite = False,
    config: Config = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no notes on stderr.")] = False,
    as_json: Json = False,
) -> None:
    """Accuracy by the reference arm's answer length, from lm-eval sample logs."""
    from ..models.loading import location_of
    from ..quartiles.run import run_quartiles

    tokenizer = None if options.tokenizer is None else location_of(options.tokenizer)
    result = run_quartiles(**asdict(replace(options, tokenizer=tokenizer)), output=output, overwrite=overwrite)
    for note in () if quiet else result["notes"]:
        print(f"replayssm-eval: {note}", file=sys.stderr)
    for warning in result["warnings"]:
        print(f"replayssm-eval: {warning}", file=sys.stderr)
    if as_json:
        print((Path(result["output"]) / "quartiles.json").read_text(encoding="utf-8"), end="")
    else:
        print_quartiles(result)


def print_quartiles(result: dict[str, Any]) -> None:
    """One table per arm, its reading below it."""
    from rich.table import Table
    from rich.text import Text

    from ..quartiles import report as quartile_report

    console = make_console()
    columns = quartile_report.COLUMNS
    half = columns.index("cut off")
    # On a narrow terminal 17 columns would be cut to pieces: the table comes in two halves.
    parts = (
        [range(len(columns))]
        if console.width >= _WIDE
        else [(*range(half), len(columns) - 1), (0, *range(half, len(columns) - 1))]
    )
    for variant in result["variants"]:
        for number, part in enumerate(parts):
            title = Text(quartile_report.title(result, variant)) if number == 0 else None
            table = Table(title=title, title_justify="left", box=None, pad_edge=False)
            for i in part:
                table.add_column(columns[i], justify="left" if columns[i] in ("length", "verdict") else "right")
            for row in quartile_report.rows(result, variant):
                table.add_row(*(Text(row[i]) for i in part))
            console.print(table)
        for line in quartile_report.reading(result, variant):
            console.print(line, markup=False)
        console.print()
    print(f"figure: {result['output']}/quartiles.png   report: {result['output']}/quartiles.html")
