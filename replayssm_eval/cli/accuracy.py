"""The command `accuracy`. Heavy imports happen inside it, so that --help answers at once."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from replayssm_emulation.errors import UsageError

from ..accuracy.options import AccuracyOptions
from .options import Config, Overwrite, Quiet, takes_options
from .quartiles import print_quartiles

EPILOG = (
    "Example: replayssm-eval accuracy --model nemotron-3-nano-4b --task gsm8k --task-data gsm8k=gsm8k_test.jsonl "
    "--output out (without any option: the testbed tiny-answers and its generated task, some minutes on two CPU cores)"
)


@takes_options(AccuracyOptions, AccuracyOptions.with_defaults_of_model)
def accuracy(
    options: AccuracyOptions,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results. Default: runs/accuracy-MODEL-TIME.")
    ] = None,
    overwrite: Overwrite = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of the same options.")] = False,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Answer tasks with fp32 states, again as a control, and with every scheme; compare by answer length."""
    import logging

    options.parsed()  # before torch is imported: a typing error should cost no wait
    if resume and output is None:
        raise UsageError("--resume needs --output: the folder of the run to go on with")
    from ..accuracy.run import run_accuracy
    from ..results.files import default_output

    def say(line: str) -> None:
        if not quiet:
            print(f"replayssm-eval: {line}", file=sys.stderr, flush=True)

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folder = output or default_output("accuracy", options.model)
    try:
        arms = run_accuracy(options, folder, overwrite=overwrite, resume=resume, say=say)
    except KeyboardInterrupt:
        print("replayssm-eval: interrupted; finished batches are kept for --resume", file=sys.stderr)
        raise typer.Exit(130) from None
    _compare(arms, folder)


def _compare(arms: dict[str, Path], folder: Path) -> None:
    """Make and print the quartile tables of every task. arms: folders by name, the reference first."""
    from ..accuracy.run import CONTROL, REFERENCE
    from ..quartiles.run import run_quartiles

    reference, *others = arms
    assert reference == REFERENCE
    tasks = sorted({path.stem.removeprefix("samples_") for path in arms[REFERENCE].glob("samples_*.jsonl")})
    for name in tasks:
        result = run_quartiles(
            arms[REFERENCE],
            [arms[arm] for arm in others],
            names=list(arms),
            controls=[CONTROL],
            task=name,
            output=folder / f"quartiles-{name}",
            overwrite=True,
        )
        for warning in result["warnings"]:
            print(f"replayssm-eval: {warning}", file=sys.stderr)
        print_quartiles(result)
