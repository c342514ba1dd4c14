"""The command `quartiles`. Heavy imports happen inside it, so that --help answers at once."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

_WIDE = 210  # columns of a terminal that holds the whole table


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    from .main import Json, _load_config  # not at the top: cli imports this module

    @app.command(
        epilog="Example: replayssm-eval quartiles runs/fp32 runs/nvfp4 --control runs/fp32-again --filter strict-match --output out"
    )
    def quartiles(
        reference: Annotated[
            Path,
            typer.Argument(
                metavar="REFERENCE", help="lm-eval samples of the reference arm: a .jsonl or .json file, or a folder."
            ),
        ],
        variant: Annotated[
            list[Path] | None, typer.Argument(metavar="VARIANT...", help="The same of the arms to compare with it.")
        ] = None,
        control: Annotated[
            list[str] | None,
            typer.Option(
                metavar="NAME|PATH",
                help="The reference run again: a variant's name, or another file or folder. Repeatable. Default: arms named control.",
            ),
        ] = None,
        name: Annotated[
            list[str] | None,
            typer.Option(
                metavar="TEXT", help="Name of an arm, once for each in order. Default: file and folder names."
            ),
        ] = None,
        task: Annotated[
            str | None,
            typer.Option(help="Task, when a folder has several; a pattern such as 'math_*' pools its tasks."),
        ] = None,
        filter_name: Annotated[
            str | None, typer.Option("--filter", help="lm-eval filter, when the samples have several.")
        ] = None,
        metric: Annotated[
            str | None, typer.Option(help="Score of a sample. Default: exact_match, or the only one of 0 and 1.")
        ] = None,
        bins: Annotated[int, typer.Option(help="Bins of the reference's answer length.")] = 4,
        tokenizer: Annotated[
            str | None, typer.Option(help="Hub id or folder: counts tokens where the samples record none.")
        ] = None,
        allow_cut: Annotated[
            bool, typer.Option("--allow-cut", help="Leave out a last line that is not whole.")
        ] = False,
        output: Annotated[
            Path | None, typer.Option(help="Folder for the results. Default: runs/quartiles-TASK-TIME.")
        ] = None,
        overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the output folder.")] = False,
        config: Annotated[
            Path | None, typer.Option(help="YAML file with any of these options.", is_eager=True, callback=_load_config)
        ] = None,
        quiet: Annotated[bool, typer.Option("--quiet", help="No notes on stderr.")] = False,
        as_json: Json = False,
    ) -> None:
        """Accuracy by the reference arm's answer length, from lm-eval sample logs."""
        from ..quartiles.run import run_quartiles

        result = run_quartiles(
            reference,
            variant or (),
            controls=control or (),
            names=name or (),
            task=task,
            filter_name=filter_name,
            metric=metric,
            tokenizer=tokenizer,
            bins=bins,
            allow_cut=allow_cut,
            output=output,
            overwrite=overwrite,
        )
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
    from .main import _console

    console = _console()
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
