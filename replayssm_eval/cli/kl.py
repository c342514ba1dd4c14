"""The command `kl`. Heavy imports happen inside it, so that --help answers at once."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..kl.options import KlOptions
from .console import console as make_console
from .options import Config, Json, Overwrite, Quiet, takes_options

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
    from ..kl.run import run_kl
    from ..results.progress import on_stderr

    try:
        with on_stderr(quiet) as update:
            result = run_kl(options, output=output, overwrite=overwrite, resume=resume, progress=update)
    except KeyboardInterrupt:
        print("replayssm-eval: interrupted; finished chunks, if any, are kept for --resume", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print((Path(result["output"]) / "kl.json").read_text(encoding="utf-8"), end="")
    else:
        _print_kl(result)
    for problem in result["problems"]:
        print(f"replayssm-eval: {problem}", file=sys.stderr)
    if result["status"] == "interrupted":
        print(
            f"replayssm-eval: interrupted after {result['tokens']} tokens; "
            f"what was finished is in {result['output']}; go on with --resume",
            file=sys.stderr,
        )
        raise typer.Exit(130)
    if result["status"] != "complete":
        raise typer.Exit(1)


def _print_kl(result: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from ..kl import figure, report
    from ..results.plotting import thousands
    from ..results.templates import number

    table = Table(
        title="Mean KL against fp32 state, nats per token, by position" + report.random_note(result),
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    console = make_console()
    fitting = max(2, (console.width - 60) // 10)
    bins = list(range(len(result["bins"])))
    if len(bins) > fitting:  # a narrow terminal shows the ends and what fits between; the report has all
        bins = sorted({round(i * (len(bins) - 1) / (fitting - 1)) for i in range(fitting)})
    columns = [f"{thousands(a)}–{thousands(b)}" for a, b in (result["bins"][i] for i in bins)]
    for column in ("scheme", *columns, "all", "p99", "same top-1", "ΔNLL"):
        table.add_column(column, justify="left" if column == "scheme" else "right", no_wrap=True)
    for row in result["rows"]:
        if row["role"] != "reference":
            figures = [number(v) for v in (*(row["kl_mean"][i] for i in bins), row["kl"], row["kl_p99"])]
            table.add_row(
                Text(figure.label(row)),
                *figures,
                number(row["same_top1_overall"], 4),
                number(row["nll_difference_overall"], 2),
            )
    console.print(table)
    if len(bins) < len(result["bins"]):
        console.print(f"({len(result['bins']) - len(bins)} bins are not shown; the report has all)")
    for line in report.reading(result):
        console.print(line, markup=False)
    print(f"figure: {result['output']}/kl.png   report: {result['output']}/report.html")
