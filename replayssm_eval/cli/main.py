"""The command line. Heavy imports happen inside commands, so that --help answers at once."""

import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from replayssm_emulation.errors import RunError, UsageError

_SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda token: token.replace("_", "-")}
app = typer.Typer(
    help="How far does a model drift when its recurrent state is stored in low precision, and from which position on?",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings=_SETTINGS,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")]


def _console() -> Any:
    from rich.console import Console

    console = Console(highlight=False)
    # A file or pipe has no width: rich would cut tables to 80 columns.
    return console if console.is_terminal else Console(highlight=False, width=210)


def _load_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Values of a YAML file become the defaults of the flags; flags on the command line win."""
    if path is None:
        return None
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UsageError(f"--config {path}: not a mapping of options to values")
    parameters = {name.lstrip("-").replace("-", "_"): p for p in ctx.command.params for name in (*p.opts, p.name or "")}
    defaults = {}
    for key, value in values.items():
        parameter = parameters.get(str(key).replace("-", "_"))
        if parameter is None:
            flags = {max(p.opts, key=len).lstrip("-") for p in ctx.command.params} - {"config"}
            known = ", ".join(sorted(flags))
            raise UsageError(f"--config {path}: unknown option {key!r}; known: {known}")
        if value is None:  # left empty: the flag's own default
            continue
        several, flag = getattr(parameter, "multiple", False), getattr(parameter, "is_flag", False)
        if flag != isinstance(value, bool) or (isinstance(value, list | dict) and not several):
            raise UsageError(f"--config {path}: {key}: {value!r} is not a value of this option")
        # As text, a value goes through the same checks as on the command line.
        defaults[parameter.name] = (
            [str(v) for v in (value if isinstance(value, list) else [value])]
            if several
            else value
            if flag
            else str(value)
        )
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return path


def _listing(title: str, columns: tuple[str, ...], rows: Sequence[tuple[Any, ...]], as_json: bool) -> None:
    if as_json:
        keys = [c.replace(" ", "_") for c in columns]
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=1, ensure_ascii=False))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0], overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    _console().print(table)


@app.command(epilog="Example: replayssm-eval formats --json")
def formats(as_json: Json = False) -> None:
    """List the number formats that a state can be stored in."""
    from replayssm_emulation.formats import FORMATS

    rows: list[tuple[Any, ...]] = [(f.name, round(f.bits_per_element(64, 128), 3), f.summary) for f in FORMATS.values()]
    rows += (
        []
        if as_json
        else [
            ("NAME-head, NAME-bN", "", "fp8, fp8-e5m2 and int formats: one scale per head, or per N elements of a row"),
            ("NAME-unscaled", "", "fp8 and fp8-e5m2: a bare cast without a scale"),
            ("NAME-even, NAME-rceil", "", "mx formats: other scale rules"),
        ]
    )
    _listing(
        "Formats (bits per element of a 64 x 128 head, scales included)",
        ("format", "bits", "what it is"),
        rows,
        as_json,
    )


@app.command(epilog="Example: replayssm-eval schemes")
def schemes(as_json: Json = False) -> None:
    """Explain how a scheme is spelled; list its options and the presets."""
    from replayssm_emulation.scheme import OPTIONS, PRESETS, parse_scheme

    rows = [
        (text, parse_scheme(text).describe()) for text in ("fp32", "nvfp4@16", "nvfp4-rn@16", "fp8@1", "nvfp4/fp16@16")
    ]
    rows += [(name, f"{summary} = {spelled}") for name, (spelled, summary) in PRESETS.items()]
    for option, (allowed, default, summary) in OPTIONS.items():
        values = "|".join(allowed) or "1..32"
        rows.append((f"+{option}={values}", f"{summary} (default {default})"))
    _listing(
        "Schemes: FORMAT[@L] shared, READ/RECURRENCE[@L] separate; -rn nearest, -sr stochastic; +key=value options",
        ("scheme", "what it means"),
        rows,
        as_json,
    )


@app.command(
    epilog="Example: replayssm-eval kl --model tiny-mamba2 --scheme nvfp4@16 --scheme nvfp4/fp16@16 --tokens 16384 --output out"
)
def kl(
    model: Annotated[str, typer.Option(help="Name (see `models`), hub id or local folder.")] = "tiny-mamba2",
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="How the state is stored, e.g. nvfp4/fp16@16 (see `schemes`). Repeatable. Default: nvfp4-rn@16, nvfp4@16, fp8@16, nvfp4/fp16@16.",
        ),
    ] = None,
    corpus: Annotated[
        str, typer.Option(help="builtin, pg19, or a .txt/.jsonl/.parquet file or a folder of them.")
    ] = "builtin",
    books: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Book by title or index; repeatable. Default: the first.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of pg19.")] = "test",
    text_key: Annotated[
        str | None, typer.Option(help="Key or column of the text, if it is not `text` or `book_text`.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of every book to read.")] = 16384,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens that run in full precision before decoding starts.")] = 0,
    chunk_size: Annotated[
        int, typer.Option(help="Tokens per forward pass: memory and progress, not the result.")
    ] = 2048,
    seed: Annotated[
        list[int] | None,
        typer.Option(metavar="INTEGER", help="Seed of the rounding noise; repeatable, each is a row. Default 0."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Weights: auto, float32, bfloat16, float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="Spread the layers over devices (accelerate), e.g. auto.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code that comes with the checkpoint.")
    ] = False,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="True shape, random weights: for cost and memory, never for accuracy."),
    ] = False,
    follow_hf_clamp: Annotated[
        bool, typer.Option("--follow-hf-clamp", help="Clamp Mamba-2's time step as transformers' prefill does.")
    ] = False,
    backend: Annotated[str, typer.Option(help="Of the state scan: auto, torch or triton.")] = "auto",
    engine: Annotated[
        str, typer.Option(help="scan: a chunk at a time; decode: token by token, slowly, as generation does.")
    ] = "scan",
    output: Annotated[Path | None, typer.Option(help="Folder for the results. Default: runs/kl-MODEL-TIME.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the output folder.")] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with an interrupted run of the same options; start it if there is none."),
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of these options.", is_eager=True, callback=_load_config)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
    as_json: Json = False,
) -> None:
    """Teacher-forced KL of every scheme against fp32 state, by token position."""
    from replayssm_emulation import parse_scheme

    from ..models.loading import check_dtype

    for text in scheme or []:  # before torch is imported: a typing error should cost no wait
        parse_scheme(text)
    check_dtype(dtype)
    from ..kl.run import DEFAULT_SCHEMES, KlOptions, run_kl
    from ..results.progress import on_stderr

    options = KlOptions(
        model=model,
        schemes=scheme or DEFAULT_SCHEMES,
        corpus=corpus,
        books=books or (),
        split=split,
        text_key=text_key,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        chunk_size=chunk_size,
        seeds=seed or (0,),
        dtype=dtype,
        device=device,
        device_map=device_map,
        revision=revision,
        trust_remote_code=trust_remote_code,
        follow_hf_clamp=follow_hf_clamp,
        backend=backend,
        engine=engine,
        random_weights=random_weights,
    )
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
            f"replayssm-eval: interrupted after {result['tokens']} tokens; what was finished is in {result['output']}; go on with --resume",
            file=sys.stderr,
        )
        raise typer.Exit(130)
    if result["status"] != "complete":
        raise typer.Exit(1)


@app.command(epilog="Example: replayssm-eval bench --scheme nvfp4/fp16@16 --scheme fp8@1 --json")
def bench(
    scheme: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Scheme to time; repeatable. Default: a selection, and all of it mixed."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="State layer: HEADSxD_VxD_K[xGROUPS]. Default: 128x64x128x8 on a GPU, 8x64x64x8 on a CPU."),
    ] = None,
    delta_shape: Annotated[
        str | None, typer.Option(help="Layer of the delta rule. Default: 32x128x128x16 on a GPU, 8x64x64x8 on a CPU.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per call. Default: 8192 on a GPU, 256 on a CPU.")] = None,
    rows: Annotated[int, typer.Option(help="Batch rows that run together.")] = 9,
    backend: Annotated[str, typer.Option(help="Of the state scan: auto, torch or triton.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    repeats: Annotated[int, typer.Option(help="Calls of which the median counts.")] = 5,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
    as_json: Json = False,
) -> None:
    """Time the kernels beside their floor and their peers, in one run on this machine."""
    import datetime

    from replayssm_emulation import parse_scheme

    for text in scheme or []:
        parse_scheme(text)
    from ..bench import run as module

    started = datetime.datetime.now(datetime.UTC)
    result = module.run_bench(
        scheme or module.DEFAULT_SCHEMES,
        shape=shape,
        delta_shape=delta_shape,
        tokens=tokens,
        rows=rows,
        backend=backend,
        device=device,
        repeats=repeats,
        say=(lambda line: None) if quiet else (lambda line: print(f"timing {line}", file=sys.stderr)),
    )
    if as_json:
        print(json.dumps(module.as_json(result, started), indent=1))
        return
    columns = ("kernel", "ms", "ms/row", "µs/token", "GB", "TFLOP", "floor ms", "bound by", "ratio")

    def cells(k: dict[str, Any]) -> tuple:
        times = (k["ms"], k["ms_per_row"], k["us_per_token"], k["bytes"] / 1e9, k["flops"] / 1e12, k["floor_ms"])
        return (k["name"], *(f"{n:.3g}" for n in times), k["bound_by"], f"{k['ratio_to_floor']:.3g}")

    title = f"{result['shape']} (heads x d_v x d_k x groups), {result['tokens']} tokens, {result['rows']} rows, {result['dtype']}, {result['backend']} scan, {result['device']}"
    _listing(title, columns, [cells(k) for k in result["kernels"]], False)
    delta = [(*cells(k), f"{k['ratio_to_plain']:.3g}") for k in result["delta"]["kernels"]]
    _listing(
        f"Delta rule beside the plain recurrence, {result['delta']['shape']}", (*columns, "to plain"), delta, False
    )
    peers = []
    for p in result["peers"]:
        measured = (f"{p['ms']:.3g}", f"{p['us_per_token']:.3g}") if "ms" in p else ("", p["error"])
        peers.append((p["name"], p.get("rows", ""), p.get("tokens", ""), *measured))
    _listing("Peers in the same run", ("peer", "rows", "tokens", "ms", "µs/token"), peers, False)
    rates = result["ceilings"]
    parts = [
        f"copy {rates['copy_bytes_per_s'] / 1e12:.2f} TB/s",
        f"TF32 {rates['tf32_flops_per_s'] / 1e12:.3g} TFLOP/s",
    ]
    parts += [f"bf16 {rates['bf16_flops_per_s'] / 1e12:.3g} TFLOP/s"] if rates["bf16_flops_per_s"] else []
    parts += (
        [f"{rates['instructions_per_s'] / 1e12:.3g} T instructions/s (from the card's clock)"]
        if rates["instructions_per_s"]
        else []
    )
    print("measured here: " + ", ".join(parts))


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
    console = _console()
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


from .accuracy import register as _register_accuracy  # noqa: E402 (they take options from above)
from .models import register as _register_models  # noqa: E402
from .quartiles import register as _register_quartiles  # noqa: E402

_register_accuracy(app)
_register_models(app)
_register_quartiles(app)


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
