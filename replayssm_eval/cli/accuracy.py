"""The command `accuracy`. Heavy imports happen inside it, so that --help answers at once."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    from .main import _load_config  # not at the top: cli imports this module

    @app.command(
        epilog="Example: replayssm-eval accuracy --model nemotron-3-nano-4b --task gsm8k --task-data gsm8k=gsm8k_test.jsonl --output out "
        "(without any option: the testbed tiny-answers and its generated task, some minutes on two CPU cores)"
    )
    def accuracy(
        model: Annotated[str, typer.Option(help="Name (see `models`), hub id or local folder.")] = "tiny-answers",
        task: Annotated[
            list[str] | None,
            typer.Option(
                "--task",
                "--tasks",
                metavar="TEXT",
                help="Task of this package (gsm8k, math_level5, ...) or of lm-eval; repeatable. Default: progression for tiny-answers, which was trained on it, else gsm8k.",
            ),
        ] = None,
        scheme: Annotated[
            list[str] | None,
            typer.Option(metavar="TEXT", help="How the state is stored; repeatable. Default: nvfp4@16, nvfp4/fp16@16."),
        ] = None,
        limit: Annotated[
            int | None, typer.Option(help="Documents of each task. Default: all; 64 of tiny-answers' own task.")
        ] = None,
        task_data: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME=PATH", help="Local file in place of a task's data set; repeatable."),
        ] = None,
        batch_size: Annotated[
            int, typer.Option(help="Sequences that are generated together; the control uses half of it.")
        ] = 64,
        max_gen_toks: Annotated[int | None, typer.Option(help="Longest answer in tokens. Default: the task's.")] = None,
        max_length: Annotated[
            int | None, typer.Option(help="Longest prompt and answer together. Default: the model's.")
        ] = None,
        gen_kwargs: Annotated[
            str | None, typer.Option(help="As lm-eval takes them, e.g. temperature=0.6,do_sample=true.")
        ] = None,
        apply_chat_template: Annotated[
            bool, typer.Option("--apply-chat-template", help="Prompts as chat messages.")
        ] = False,
        num_fewshot: Annotated[int | None, typer.Option(help="Examples in the prompt. Default: the task's.")] = None,
        include_path: Annotated[str | None, typer.Option(help="Folder with lm-eval task files of your own.")] = None,
        think_end_token: Annotated[
            str | None, typer.Option(help="End of the thinking part, as text or token id.")
        ] = None,
        seed: Annotated[int, typer.Option(help="Seed of the rounding noise.")] = 0,
        dtype: Annotated[str, typer.Option(help="Weights: auto, float32, bfloat16, float16.")] = "auto",
        device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
        revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
        trust_remote_code: Annotated[
            bool, typer.Option("--trust-remote-code", help="Run model code that comes with the checkpoint.")
        ] = False,
        backend: Annotated[str, typer.Option(help="Of the state scan: auto, torch or triton.")] = "auto",
        output: Annotated[
            Path | None, typer.Option(help="Folder for the results. Default: runs/accuracy-MODEL-TIME.")
        ] = None,
        overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the output folder.")] = False,
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on with an interrupted run of the same options.")
        ] = False,
        config: Annotated[
            Path | None, typer.Option(help="YAML file with any of these options.", is_eager=True, callback=_load_config)
        ] = None,
        quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
    ) -> None:
        """Answer tasks with fp32 states, again as a control, and with every scheme; compare by answer length."""
        import logging

        from replayssm_emulation import parse_scheme
        from replayssm_tasks import parse_task_data

        from ..models.loading import check_dtype

        for text in scheme or []:
            parse_scheme(text)
        check_dtype(dtype)
        data = parse_task_data(task_data or [])
        if resume and output is None:
            from replayssm_emulation import UsageError

            raise UsageError("--resume needs --output: the folder of the run to go on with")
        from ..accuracy.run import (
            CONTROL,
            DEFAULT_SCHEMES,
            REFERENCE,
            TESTBED,
            TESTBED_LIMIT,
            TESTBED_TASKS,
            AccuracyOptions,
            run_accuracy,
        )
        from ..quartiles.run import run_quartiles
        from ..results.files import default_output
        from .quartiles import print_quartiles

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        folder = output or default_output("accuracy", model)
        own = model == TESTBED and not task
        options = AccuracyOptions(
            model=model,
            schemes=scheme or DEFAULT_SCHEMES,
            tasks=task or (TESTBED_TASKS if own else ("gsm8k",)),
            limit=TESTBED_LIMIT if own and limit is None else limit,
            batch_size=batch_size,
            seed=seed,
            task_data=data,
            max_gen_toks=max_gen_toks,
            max_length=max_length,
            gen_kwargs=gen_kwargs,
            apply_chat_template=apply_chat_template,
            num_fewshot=num_fewshot,
            include_path=include_path,
            think_end_token=think_end_token,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            backend=backend,
        )
        try:
            arms = run_accuracy(
                options,
                folder,
                overwrite=overwrite,
                resume=resume,
                say=(lambda line: None)
                if quiet
                else (lambda line: print(f"replayssm-eval: {line}", file=sys.stderr, flush=True)),
            )
        except KeyboardInterrupt:
            print("replayssm-eval: interrupted; finished batches are kept for --resume", file=sys.stderr)
            raise typer.Exit(130) from None
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
