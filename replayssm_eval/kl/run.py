"""Teacher-forced KL: a book goes through the model once, every scheme beside the fp32 reference, chunk after chunk."""

import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from replayssm_emulation import UsageError
from torch import Tensor

from ..inference.metrics import TokenMetrics
from ..models.loading import Loaded, load, weights_digest
from ..results.files import check_output, default_output, jsonable, write_atomic, write_json
from ..results.progress import OnProgress, silent
from ..results.provenance import code_digests, collect_provenance
from .checkpoint import Checkpoint, Fingerprint
from .corpus import Book, load_books
from .figure import kl_figure
from .options import DEFAULT_SCHEMES, ENGINES, KlOptions
from .reading import Reader, Readings, encode
from .report import kl_html, kl_markdown
from .result import BookFacts, CorpusFacts, KlResult, ModelFacts, RowResult, as_json
from .rows import RunRow, run_rows
from .series import compared, parquet, stack_books
from .statistics import RowStatistics, entropy_counts, interval_method, position_bins, row_statistics

__all__ = ["DEFAULT_SCHEMES", "ENGINES", "OUTPUT_FILES", "FinishedRun", "KlOptions", "run_comparison", "run_kl"]

OUTPUT_FILES = ("kl.json", "kl.parquet", "kl.png", "kl.svg", "report.md", "report.html")
_MOST_NEGATIVE_KL = -1e-6  # below this a KL is wrong, not rounded
_ROOMS = ("models", "inference", "kl")


@dataclass(frozen=True)
class FinishedRun:
    """The result of a run and the folder that holds its files."""

    result: KlResult
    folder: Path


def run_kl(
    options: KlOptions | None = None,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    loaded: Loaded | None = None,
    progress: OnProgress = silent,
    **changes: Any,
) -> dict[str, Any]:
    """Run the comparison, write `output` and return what kl.json holds, with the folder under "output".

    options, changes: a `KlOptions`, and fields of it as keywords, which win.
    output: the folder; None makes runs/kl-<model>-<time>.
    loaded: a model that is loaded already (options.model then only names it). progress: called after every chunk.
    "status" is "complete", "failed" (non-finite or wrong numbers: see "problems") or "interrupted".
    Raises UsageError for bad options or inputs, RunError when nothing can be compared.
    """
    options = replace(options or KlOptions(), **changes)
    run = run_comparison(options, output=output, overwrite=overwrite, resume=resume, loaded=loaded, progress=progress)
    return {**jsonable(as_json(run.result)), "output": str(run.folder)}


def run_comparison(
    options: KlOptions,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    loaded: Loaded | None = None,
    progress: OnProgress = silent,
) -> FinishedRun:
    """`run_kl` with a typed result."""
    started = datetime.datetime.now(datetime.UTC)
    schemes = options.parsed()
    if resume and output is None:
        raise UsageError("--resume needs --output: the folder of the run to go on with")
    folder = Path(output) if output is not None else default_output("kl", options.model)
    check_output(folder, overwrite, resume)
    books = load_books(options.corpus, list(options.books), options.split, options.text_key)
    loaded = loaded or load(options)
    rows = run_rows(schemes, list(options.seeds))
    ids = [encode(loaded.tokenizer, book, options.tokens) for book in books]
    checkpoint = Checkpoint(folder / "parts", _fingerprint(options, loaded, rows, ids), options.tokens)
    readings = Readings(checkpoint.load_chunks() if resume else [], checkpoint.manifest)
    if overwrite and not resume:
        _clear(folder, checkpoint)
    Reader(options, loaded, [book.title for book in books], ids, rows, checkpoint, progress).read(readings)
    metrics = stack_books(compared(readings.series, options.tokens))
    result = _result(options, loaded, books, rows, readings, metrics, started)
    _write(folder, result, metrics, parquet(rows, readings.series, ids))
    if not readings.interrupted:
        checkpoint.remove()
    return FinishedRun(result, folder)


def _fingerprint(options: KlOptions, loaded: Loaded, rows: Sequence[RunRow], ids: Sequence[Tensor]) -> Fingerprint:
    """Everything that changes a number, by name. Parts of another run are never mixed in."""
    decisive = (
        loaded.info,
        options.tokens,
        options.prompt_tokens,
        options.chunk_size,
        options.follow_hf_clamp,
        options.backend,
        options.engine,
        [(str(row.scheme), row.seed) for row in rows],
    )
    digests = code_digests(rooms=_ROOMS)
    return {
        "options": hashlib.sha256(json.dumps(decisive, default=str).encode()).hexdigest(),
        "text": hashlib.sha256(b"".join(one.numpy().tobytes() for one in ids)).hexdigest(),
        "weights": weights_digest(loaded.model),
        "versions of torch and transformers": f"{torch.__version__} {transformers.__version__}",
        **{f"code in {room}": digest for room, digest in digests.items()},
    }


def _clear(folder: Path, checkpoint: Checkpoint) -> None:
    """Remove what an earlier run left under our own names, and nothing else."""
    for name in OUTPUT_FILES:
        (folder / name).unlink(missing_ok=True)
    checkpoint.remove()


def _result(
    options: KlOptions,
    loaded: Loaded,
    books: Sequence[Book],
    rows: Sequence[RunRow],
    readings: Readings,
    metrics: TokenMetrics,
    started: datetime.datetime,
) -> KlResult:
    """metrics: arrays `[R, books, tokens]` of the books that are compared."""
    _, book_count, tokens = metrics.kl.shape
    prompt = options.prompt_tokens
    bins = position_bins(tokens, prompt)
    problems, row_results = list(readings.problems), []
    for index, row in enumerate(rows):
        statistics = row_statistics(metrics, index, bins)
        flushes = row.count_flushes(prompt, 0, tokens)
        row_results.append(RowResult(str(row.scheme), row.seed, row.role, statistics, flushes))
        problems += _implausible(row, statistics, flushes)
        if statistics.nonfinite and index not in readings.nonfinite_rows:
            problems.append(f"{row.name} is not finite at {statistics.nonfinite} positions")
    return KlResult(
        status="interrupted" if readings.interrupted else "failed" if problems else "complete",
        problems=problems,
        model=ModelFacts(loaded.info, readings.manifest),
        corpus=_corpus_facts(options, books, readings),
        tokens=tokens,
        prompt_tokens=prompt,
        backend=readings.backend,
        options={**options.to_json(), "schemes": [row.scheme for row in row_results[2:]]},
        vocabulary=int(loaded.model.get_output_embeddings().weight.shape[0]),
        bins=bins,
        entropy_tokens=entropy_counts(metrics.entropy[0][:, prompt:]),
        intervals=interval_method(book_count),
        rows=row_results,
        provenance=collect_provenance(started),
        timing=readings.timing,
    )


def _corpus_facts(options: KlOptions, books: Sequence[Book], readings: Readings) -> CorpusFacts:
    builtin = options.corpus == "builtin"
    return CorpusFacts(
        name=options.corpus,
        split=options.split if options.corpus == "pg19" else None,
        special_tokens="none added",
        books=[
            BookFacts(
                title=book.title,
                source=Path(book.source).name if builtin else book.source,
                sha256=hashlib.sha256(book.text.encode()).hexdigest(),
                characters=len(book.text),
                tokens_read=series.tokens,
            )
            for book, series in zip(books, readings.series, strict=False)  # an interrupt leaves the last books unread
        ],
    )


def _implausible(row: RunRow, statistics: RowStatistics, flushes: int) -> list[str]:
    """What shows that the numbers of a row are no result, in sentences."""
    problems = []
    if statistics.kl_min is not None and statistics.kl_min < _MOST_NEGATIVE_KL:
        problems.append(
            f"{row.name}: a KL of {statistics.kl_min:.3g} is negative beyond rounding: the comparison is wrong"
        )
    # No token reads a state that is rounded at the very end. From the second flush on, tokens read a rounded state.
    if row.rounds_state and flushes > 1 and statistics.kl_max == 0 and not statistics.nonfinite:
        problems.append(
            f"{row.name}: KL is exactly 0 on all tokens although its state was rounded: the emulation did not run"
        )
    return problems


def _write(folder: Path, result: KlResult, metrics: TokenMetrics, per_token: bytes) -> None:
    """All files; kl.json last: a folder that has it has everything."""
    write_atomic(folder / "kl.parquet", per_token)
    pictures = kl_figure(result, metrics)
    for kind in ("png", "svg"):
        write_atomic(folder / f"kl.{kind}", pictures[kind])
    write_atomic(folder / "report.md", kl_markdown(result))
    write_atomic(folder / "report.html", kl_html(result, pictures["svg"].decode()))
    write_json(folder / "kl.json", as_json(result))
