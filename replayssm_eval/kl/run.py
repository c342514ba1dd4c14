"""Teacher-forced KL: a book goes through the model once, every scheme beside the fp32 reference, chunk after chunk."""

import datetime
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from replayssm_emulation import RunError, Scheme, UsageError, parse_scheme
from replayssm_kernels import BatchRow, compiled_kernels
from torch import Tensor

from ..inference.attach import attach
from ..inference.forward import hidden_states, hidden_states_by_token, layer_devices, new_cache
from ..inference.metrics import TokenMetrics, compare_hidden
from ..inference.session import Session
from ..models.loading import Loaded, load, weights_digest
from ..results.files import (
    SCHEMA_KL,
    check_output,
    default_output,
    jsonable,
    write_atomic,
    write_json,
)
from ..results.progress import OnProgress, Progress, silent
from ..results.provenance import code_digests, provenance
from . import report
from . import statistics as stats
from .checkpoint import Checkpoint
from .corpus import Book, load_books
from .figure import kl_figure
from .options import DEFAULT_SCHEMES, ENGINES, KlOptions
from .series import RowInfo, Series, parquet, stack

__all__ = ["DEFAULT_SCHEMES", "ENGINES", "OUTPUT_FILES", "KlOptions", "row_infos", "run_kl"]

OUTPUT_FILES = ("kl.json", "kl.parquet", "kl.png", "kl.svg", "report.md", "report.html")
_MOST_NEGATIVE_KL = -1e-6  # below this a KL is wrong, not rounded


def row_infos(schemes: Sequence[Scheme], seeds: Sequence[int]) -> list[RowInfo]:
    """Reference and control, then every scheme with every seed (once, if it draws no noise)."""
    fp32 = parse_scheme("fp32")
    rows = [RowInfo(fp32, 0, "reference"), RowInfo(fp32, 0, "control")]
    for scheme in schemes:
        stochastic = any(
            c is not None and c.lossy and c.rounding == "stochastic" for c in (scheme.recurrence, scheme.read)
        )
        rows += [RowInfo(scheme, seed, "scheme") for seed in (seeds if stochastic else seeds[:1])]
    return rows


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
    started = datetime.datetime.now(datetime.UTC)
    schemes = options.parsed()
    if resume and output is None:
        raise UsageError("--resume needs --output: the folder of the run to go on with")
    folder = Path(output) if output is not None else default_output("kl", options.model)
    check_output(folder, overwrite, resume)
    books = load_books(options.corpus, list(options.books), options.split, options.text_key)
    loaded = loaded or load(options)
    run = _Run(options, loaded, books, row_infos(schemes, list(options.seeds)), folder, resume, progress)
    if overwrite and not resume:
        run.clear()
    status = run.read_books()
    result = run.result()
    result["status"] = "failed" if run.problems and status == "complete" else status
    result["provenance"] = {**provenance(started), **run.timing}
    run.write(result)
    if status != "interrupted":
        run.checkpoint.remove()
    return {**jsonable(result), "output": str(folder)}


def _encode(tokenizer: Any, book: Book, tokens: int) -> Tensor:
    """The first `tokens` token ids and, where the book goes on, the one after them (the last target)."""
    ids = tokenizer(book.text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < tokens:
        raise UsageError(f"{book.source}: --tokens {tokens} is more than the book has: {len(ids)} tokens")
    return torch.tensor(ids[: tokens + 1])


def _flushes(row: RowInfo, prompt: int, start: int, stop: int) -> int:
    """How often the schedule of a row rounds its state in the tokens [start, stop)."""
    return sum(rounded for _, rounded in BatchRow(row.scheme, prompt=prompt).folds(start, stop))


class _Run:
    """One run: its inputs, the series read so far, and what was found wrong."""

    def __init__(
        self,
        options: KlOptions,
        loaded: Loaded,
        books: list[Book],
        rows: list[RowInfo],
        folder: Path,
        resume: bool,
        progress: OnProgress,
    ):
        self.options, self.loaded, self.books, self.rows, self.folder, self.progress = (
            options,
            loaded,
            books,
            rows,
            folder,
            progress,
        )
        self.ids = [_encode(loaded.tokenizer, book, options.tokens) for book in books]
        self.checkpoint = Checkpoint(folder / "parts", self._fingerprint(), options.tokens)
        self.series = [Series(chunks) for chunks in (self.checkpoint.load_chunks() if resume else [])]
        self.problems: list[str] = []
        self.backend = ""
        self.timing: dict[str, Any] = {}
        self.broken: set[int] = set()  # rows that are not finite somewhere, each said once
        self.manifest = self.checkpoint.manifest

    def _fingerprint(self) -> dict[str, str]:
        """What decides the numbers, part by part: parts of another run are never mixed in."""
        o = self.options
        rows = [(str(r.scheme), r.seed) for r in self.rows]
        choices = [
            self.loaded.info,
            o.tokens,
            o.prompt_tokens,
            o.chunk_size,
            o.follow_hf_clamp,
            o.backend,
            o.engine,
            rows,
        ]
        digests = code_digests(rooms=("models", "inference", "kl"))
        return {
            "options": hashlib.sha256(json.dumps(choices, default=str).encode()).hexdigest(),
            "text": hashlib.sha256(b"".join(ids.numpy().tobytes() for ids in self.ids)).hexdigest(),
            "weights": weights_digest(self.loaded.model),
            "versions of torch and transformers": f"{torch.__version__} {transformers.__version__}",
            **{f"code in {room}": digest for room, digest in digests.items()},
        }

    def clear(self) -> None:
        """Remove what an earlier run left under our own names, and nothing else."""
        for name in OUTPUT_FILES:
            (self.folder / name).unlink(missing_ok=True)
        self.checkpoint.remove()

    def read_books(self) -> str:
        """Read what is not read yet; returns "complete", or "interrupted" after at least one chunk."""
        prompt = self.options.prompt_tokens
        try:
            options, schemes, began = self.options, [r.scheme for r in self.rows], time.monotonic()
            with attach(
                self.loaded.model, schemes, follow_hf_clamp=options.follow_hf_clamp, backend=options.backend
            ) as session:
                self.backend = session.backend
                if self.backend == "triton":
                    self.timing = {
                        "compiled_kernels": compiled_kernels(),
                        "start_up_s": round(time.monotonic() - began, 2),
                    }
                began = time.monotonic()
                for document in range(len(self.books)):
                    if document == len(self.series):
                        self.series.append(Series())
                    if self.series[document].tokens < self.options.tokens:
                        session.start([BatchRow(r.scheme, r.seed, document, prompt) for r in self.rows])
                        self._read_book(session, document)
                        self.timing["reading_s"] = round(time.monotonic() - began, 2)
        except KeyboardInterrupt:
            if not any(one.chunks for one in self.series):
                raise
            return "interrupted"
        return "complete"

    def _read_book(self, session: Session, document: int) -> None:
        """Go on with one book, chunk by chunk, from where its series ends."""
        model, ids, series, title = (
            self.loaded.model,
            self.ids[document],
            self.series[document],
            self.books[document].title,
        )
        tokens, prompt = self.options.tokens, self.options.prompt_tokens
        cache = new_cache(model, tokens)
        if series.tokens:
            self.checkpoint.load_state(session, cache, layer_devices(model))
        targets = torch.full((tokens,), -1)
        targets[: len(ids) - 1] = ids[1 : tokens + 1]
        head = model.get_output_embeddings()
        read = hidden_states if self.options.engine == "scan" else hidden_states_by_token
        due = [_flushes(r, prompt, 0, series.tokens) for r in self.rows]
        with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
            for position in range(series.tokens, tokens, self.options.chunk_size):
                stop = min(position + self.options.chunk_size, tokens)
                batch = ids[position:stop].to(model.device).expand(len(self.rows), -1)
                hidden = read(model, batch, cache, position)
                metrics = compare_hidden(hidden, head, targets[position:stop], session.backend)
                if session.tokens != stop:
                    raise RunError(
                        f"{title}: the state layers have seen {session.tokens} tokens where the text is at {stop}"
                    )
                due = [n + _flushes(r, prompt, position, stop) for n, r in zip(due, self.rows, strict=True)]
                session.check_rounding(due)
                series.chunks.append(metrics)
                self.manifest = session.manifest(cache)
                self.checkpoint.save_chunk(document, position, metrics, self.manifest)
                if stop < tokens:
                    self.checkpoint.save_state(document, stop, session, cache)
                self._note_nonfinite(metrics, session, position, title)
                newest = {
                    r.short: stats.mean(metrics.kl[i]) or 0.0 for i, r in enumerate(self.rows) if r.role == "scheme"
                }
                self.progress(Progress(title, document * tokens + stop, len(self.books) * tokens, newest))
                if 0 in self.broken:
                    break  # without a reference nothing can be compared

    def _note_nonfinite(self, metrics: TokenMetrics, session: Session, position: int, title: str) -> None:
        """The first non-finite KL of every row becomes one line that says where it came from."""
        for index, row in enumerate(self.rows):
            bad = np.flatnonzero(~np.isfinite(metrics.kl[index]))
            if index in self.broken or not bad.size:
                continue
            self.broken.add(index)
            layer = session.first_nonfinite_layer(index)
            where = "the output head" if layer is None else f"state layer {layer}"
            self.problems.append(
                f"{title}: {row.name} is not finite from position {position + int(bad[0])} on, first seen in {where}"
            )

    def usable(self) -> list[Series]:
        """Whole books; one that was cut short only when there is no whole one."""
        return [one for one in self.series if one.tokens == self.options.tokens] or [
            one for one in self.series if one.chunks
        ]

    def result(self) -> dict[str, Any]:
        """What kl.json holds, but for status and provenance."""
        options, series = self.options, self.usable()
        tokens = min(one.tokens for one in series)
        values = stack(series, tokens)
        prompt = options.prompt_tokens
        bins = stats.position_bins(tokens, prompt)
        rows = []
        for r, row in enumerate(self.rows):
            numbers = stats.row_statistics(
                values["kl"][r], values["same_top1"][r], values["nll"][r], values["nll"][0], values["entropy"][0], bins
            )
            flushes = _flushes(row, prompt, 0, tokens)
            rows.append({"scheme": str(row.scheme), "seed": row.seed, "role": row.role, **numbers, "flushes": flushes})
            self.problems += _doubts(row, numbers, flushes)
            if numbers["nonfinite"] and r not in self.broken:
                self.problems.append(f"{row.name} is not finite at {numbers['nonfinite']} positions")
        vocabulary = self.loaded.model.get_output_embeddings().weight.shape[0]
        builtin = options.corpus == "builtin"
        return {
            "schema": SCHEMA_KL,
            "status": "complete",
            "problems": self.problems,
            "model": {**self.loaded.info, "state_layers": self.manifest},
            "corpus": {
                "name": options.corpus,
                "split": options.split if options.corpus == "pg19" else None,
                "special_tokens": "none added",
                "books": [
                    {
                        "title": b.title,
                        "source": Path(b.source).name if builtin else b.source,
                        "sha256": hashlib.sha256(b.text.encode()).hexdigest(),
                        "characters": len(b.text),
                        "tokens_read": one.tokens,
                    }
                    for b, one in zip(self.books, self.series, strict=False)
                ],
            },
            "tokens": tokens,
            "prompt_tokens": prompt,
            "backend": self.backend,
            "options": {**options.to_json(), "schemes": [str(r.scheme) for r in self.rows[2:]]},
            "vocabulary": {
                "columns": int(vocabulary),
                "rule": "every column of the output head counts, padding included",
            },
            "bins": bins,
            "entropy_buckets": {
                "edges": [*stats.ENTROPY_EDGES, None],
                "tokens": stats.entropy_counts(values["entropy"][0][:, prompt:]),
                "of": "reference, nats; the last bucket is open",
            },
            "intervals": stats.interval_method(len(series)),
            "rows": rows,
            "control": {"kl_max": rows[1]["kl_max"]},
        }

    def write(self, result: dict[str, Any]) -> None:
        """All files; kl.json last: a folder that has it has everything."""
        write_atomic(self.folder / "kl.parquet", parquet(self.rows, self.series, self.ids))
        pictures = kl_figure(result, stack(self.usable(), result["tokens"]))
        for kind in ("png", "svg"):
            write_atomic(self.folder / f"kl.{kind}", pictures[kind])
        write_atomic(self.folder / "report.md", report.kl_markdown(result))
        write_atomic(self.folder / "report.html", report.kl_html(result, pictures["svg"].decode()))
        write_json(self.folder / "kl.json", result)


def _doubts(row: RowInfo, numbers: dict[str, Any], flushes: int) -> list[str]:
    """What makes a row's numbers no result."""
    found = []
    if numbers["kl_min"] is not None and numbers["kl_min"] < _MOST_NEGATIVE_KL:
        found.append(
            f"{row.name}: a KL of {numbers['kl_min']:.3g} is negative beyond rounding: the comparison is wrong"
        )
    # One flush at the very end is read by nobody; from two on, somebody reads a rounded state.
    rounded = any(copy is not None and copy.lossy for copy in (row.scheme.recurrence, row.scheme.read))
    if rounded and flushes > 1 and numbers["kl_max"] == 0 and not numbers["nonfinite"]:
        found.append(
            f"{row.name}: KL is exactly 0 on all tokens although its state was rounded: the emulation did not run"
        )
    return found
