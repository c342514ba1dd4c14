"""Teacher-forced KL: a book goes through the model once, every scheme beside the fp32 reference, chunk after chunk."""

import datetime
import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from replayssm_emulation import RunError, Scheme, UsageError, parse_scheme
from replayssm_kernels import Row
from transformers import DynamicCache

from . import report, stats
from .checkpoint import Checkpoint
from .corpus import Book, load_books
from .metrics import TokenMetrics, compare_hidden
from .models import Loaded, load
from .results import SCHEMA_KL, claim_output, default_output, provenance, write_atomic, write_json
from .session import Session, attach, hidden_states

DEFAULT_SCHEMES = ("nvfp4-rn@16", "nvfp4@16", "fp8@16", "nvfp4/fp16@16")
OUTPUT_FILES = ("kl.json", "kl.parquet", "kl.png", "kl.svg", "report.md", "report.html", "parts")
_MOST_NEGATIVE_KL = -1e-6  # below this a KL is wrong, not rounded


@dataclass
class KlOptions:
    """Everything that decides the numbers of a run."""

    model: str = "tiny-mamba2"
    schemes: Sequence[str | Scheme] = DEFAULT_SCHEMES
    corpus: str = "builtin"
    books: Sequence[str] = ()
    split: str = "test"
    text_key: str | None = None
    tokens: int = 16384
    prompt_tokens: int = 0
    chunk_size: int = 2048
    seeds: Sequence[int] = (0,)
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    follow_hf_clamp: bool = False

    def parsed(self) -> list[Scheme]:
        """The schemes, each once. Raises UsageError for a bad option."""
        for name, least in (("tokens", 2), ("chunk_size", 1), ("prompt_tokens", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least {least}")
        if self.prompt_tokens >= self.tokens:
            raise UsageError(f"--prompt-tokens {self.prompt_tokens} leaves nothing to decode of --tokens {self.tokens}")
        schemes = [parse_scheme(s) if isinstance(s, str) else s for s in self.schemes]
        if not schemes:
            raise UsageError("no scheme given: pass --scheme, e.g. --scheme nvfp4@16")
        if not self.seeds:
            raise UsageError("no seed given: pass --seed 0")
        if repeated := [str(s) for s in dict.fromkeys(schemes) if schemes.count(s) > 1]:
            raise UsageError(f"scheme {repeated[0]} is given twice: use --seed for repeats")
        return schemes


@dataclass
class Progress:
    """One finished chunk: where the run is, and the mean KL of each scheme in it."""

    book: str
    done: int
    total: int
    kl: dict[str, float]


@dataclass
class _RowInfo:
    scheme: Scheme
    seed: int
    role: str

    @property
    def label(self) -> str:
        return self.role if self.role != "scheme" else str(self.scheme)


@dataclass
class _Series:
    """Per-token metrics of one book, chunk by chunk."""

    parts: list[TokenMetrics] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(p.kl.shape[1] for p in self.parts)

    def running_kl(self, infos: "Sequence[_RowInfo]") -> dict[str, float]:
        """Mean KL of every scheme over the newest chunk."""
        newest = self.parts[-1].kl
        return {i.label: stats.mean(newest[r]) or 0.0 for r, i in enumerate(infos) if i.role == "scheme"}

    def get(self, name: str) -> np.ndarray:
        return np.concatenate([getattr(p, name) for p in self.parts], axis=1)


def row_infos(schemes: Sequence[Scheme], seeds: Sequence[int]) -> list[_RowInfo]:
    """Reference and control, then every scheme with every seed (once, if it draws no noise)."""
    fp32 = parse_scheme("fp32")
    rows = [_RowInfo(fp32, 0, "reference"), _RowInfo(fp32, 0, "control")]
    for scheme in schemes:
        stochastic = any(c is not None and c.lossy and c.rounding == "stochastic" for c in (scheme.recurrence, scheme.read))
        rows += [_RowInfo(scheme, seed, "scheme") for seed in (seeds if stochastic else seeds[:1])]
    return rows


def run_kl(
    options: KlOptions | None = None,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    loaded: Loaded | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    **changes: Any,
) -> dict[str, Any]:
    """Run the comparison, write `output` (design of the files: README) and return what kl.json holds.

    options, changes: a `KlOptions`, or its fields as keywords. output: the folder; None makes runs/kl-<model>-<time>.
    loaded: a model that is loaded already (options.model then only names it). progress: called after every chunk.
    The returned "status" is "complete", "failed" (non-finite or wrong numbers: see "problems") or "interrupted".
    Raises UsageError for bad options or inputs, RunError when nothing can be compared.
    """
    options = KlOptions(**changes) if options is None else options
    started = datetime.datetime.now(datetime.UTC)
    schemes = options.parsed()
    folder = Path(output) if output is not None else default_output("kl", options.model)
    claim_output(folder, OUTPUT_FILES, overwrite, resume)
    books = load_books(options.corpus, list(options.books), options.split, options.text_key)
    loaded = loaded or load(
        options.model,
        dtype=options.dtype,
        device=options.device,
        device_map=options.device_map,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )
    encoded = [_encode(loaded.tokenizer, book, options.tokens) for book in books]
    infos = row_infos(schemes, list(options.seeds))
    checkpoint = Checkpoint(folder / "parts", _fingerprint(options, infos, encoded, loaded), options.tokens)
    series = [_Series(chunks) for chunks in (checkpoint.load_chunks() if resume else [])]

    problems: list[str] = []
    status, manifest = "complete", []
    with attach(loaded.model, [i.scheme for i in infos], follow_hf_clamp=options.follow_hf_clamp) as session:
        for document, (book, ids) in enumerate(zip(books, encoded, strict=True)):
            if document == len(series):
                series.append(_Series())
            if series[document].tokens == options.tokens:
                continue
            session.start([Row(i.scheme, i.seed, document, options.prompt_tokens) for i in infos])
            try:
                manifest = _run_book(
                    loaded.model, session, ids, book.title, document, options, infos, series[document], checkpoint, problems, progress
                )
            except KeyboardInterrupt:
                status = "interrupted"
                break

    if not any(one.parts for one in series):
        raise KeyboardInterrupt
    result = _assemble(options, loaded, books, encoded, infos, series, manifest, problems)
    result["status"] = "failed" if result["problems"] and status == "complete" else status
    result["provenance"] = provenance(started)
    _write(folder, result, infos, series, encoded, options.tokens)
    if status != "interrupted":
        checkpoint.remove()
    result["output"] = str(folder)
    return result


def _encode(tokenizer: Any, book: Book, tokens: int) -> torch.Tensor:
    """The first `tokens` token ids and, where the book goes on, the one after them (the last target)."""
    ids = tokenizer(book.text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < tokens:
        raise UsageError(f"{book.source}: --tokens {tokens} is more than the book has: {len(ids)} tokens")
    return torch.tensor(ids[: tokens + 1])


def _run_book(model, session: Session, ids, title, document, options: KlOptions, infos, series: _Series, checkpoint, problems, progress):
    """Read one book chunk by chunk, going on where `series` ends; returns the manifest of the state layers."""
    cache = DynamicCache(config=model.config)
    if series.tokens:
        checkpoint.load_state(session, cache, model.device)
    tokens, chunk = options.tokens, options.chunk_size
    targets = torch.full((tokens,), -1)
    targets[: len(ids) - 1] = ids[1 : tokens + 1]
    head = model.get_output_embeddings()
    broken: set[int] = set()
    with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
        for position in range(series.tokens, tokens, chunk):
            stop = min(position + chunk, tokens)
            batch = ids[position:stop].to(model.device).expand(len(infos), -1)
            metrics = compare_hidden(hidden_states(model, batch, cache, position), head, targets[position:stop])
            if session.tokens != stop:
                raise RunError(f"{title}: the state layers have seen {session.tokens} tokens where the text is at {stop}")
            if session.flushes != (expected := [_flushes(i, options.prompt_tokens, stop) for i in infos]):
                raise RunError(f"{title}: states were rounded {session.flushes} times by position {stop} where {expected} was due")
            series.parts.append(metrics)
            checkpoint.save_chunk(document, position, metrics)
            if stop < tokens:
                checkpoint.save_state(document, stop, session, cache)
            _report_nonfinite(metrics, session, infos, position, title, broken, problems)
            progress(Progress(title, stop, tokens, series.running_kl(infos)))
            if 0 in broken:
                break
    return session.manifest(cache)


def _usable(series: list[_Series], tokens: int) -> list[_Series]:
    """Whole books; one that was cut short only when there is no whole one."""
    return [one for one in series if one.tokens == tokens] or [one for one in series if one.parts]


def _flushes(info: _RowInfo, prompt: int, stop: int) -> int:
    """How often the schedule of a row rounds its state in the tokens [0, stop)."""
    return sum(rounded for _, rounded in Row(info.scheme, prompt=prompt).folds(0, stop))


def _report_nonfinite(metrics, session, infos, position, title, broken, problems) -> None:
    """The first non-finite KL of every row becomes one line that says where it came from."""
    for row, info in enumerate(infos):
        bad = np.flatnonzero(~np.isfinite(metrics.kl[row]))
        if row in broken or not bad.size:
            continue
        broken.add(row)
        layer = session.first_nonfinite_layer(row)
        where = "the output head" if layer is None else f"state layer {layer}"
        problems.append(
            f"{title}: {info.label} (seed {info.seed}) is not finite from position {position + int(bad[0])} on, first seen in {where}"
        )


def _assemble(options, loaded, books, encoded, infos, series, manifest, problems) -> dict[str, Any]:
    complete = _usable(series, options.tokens)
    tokens = min(one.tokens for one in complete)
    flushes = [_flushes(info, options.prompt_tokens, tokens) for info in infos]
    stacked = {name: np.stack([one.get(name)[:, :tokens] for one in complete], axis=1) for name in ("kl", "same_top1", "nll", "entropy")}
    bins = stats.position_bins(tokens)
    rows = []
    for r, info in enumerate(infos):
        numbers = stats.row_statistics(
            stacked["kl"][r], stacked["same_top1"][r], stacked["nll"][r], stacked["nll"][0], stacked["entropy"][0], bins
        )
        rows.append({"scheme": str(info.scheme), "seed": info.seed, "role": info.role, **numbers, "flushes": flushes[r]})
        if numbers["kl_min"] is not None and numbers["kl_min"] < _MOST_NEGATIVE_KL:
            problems.append(f"{info.label}: a KL of {numbers['kl_min']:.3g} is negative beyond rounding: the comparison is wrong")
        if numbers["nonfinite"] and not any(f"{info.label} (seed {info.seed})" in p for p in problems):
            problems.append(f"{info.label} (seed {info.seed}) is not finite at {numbers['nonfinite']} positions")
        rounded_and_read = info.scheme.lossy and flushes[r] > 1
        if rounded_and_read and numbers["kl_max"] == 0 and not numbers["nonfinite"]:
            problems.append(f"{info.label}: KL is exactly 0 on all tokens although its state was rounded: the emulation did not run")
    edges = [None if e == np.inf else e for e in stats.ENTROPY_EDGES]
    counts = np.histogram(np.maximum(stacked["entropy"][0], 0), bins=np.array(stats.ENTROPY_EDGES))[0]
    return {
        "schema": SCHEMA_KL,
        "status": "complete",
        "problems": problems,
        "model": {**loaded.info, "state_layers": manifest},
        "corpus": {
            "name": options.corpus,
            "books": [
                {
                    "title": b.title,
                    "source": Path(b.source).name if options.corpus == "builtin" else b.source,
                    "sha256": hashlib.sha256(b.text.encode()).hexdigest(),
                    "characters": len(b.text),
                }
                for b in books
            ],
        },
        "tokens": tokens,
        "prompt_tokens": options.prompt_tokens,
        "chunk_size": options.chunk_size,
        "follow_hf_clamp": options.follow_hf_clamp,
        "vocabulary": {
            "columns": int(loaded.model.get_output_embeddings().weight.shape[0]),
            "rule": "every column of the output head counts, padding included",
        },
        "bins": bins,
        "entropy_buckets": {"edges": edges, "tokens": counts, "of": "reference, nats"},
        "intervals": "95% percentile bootstrap over " + ("books" if len(complete) >= 8 else "blocks of consecutive tokens"),
        "rows": rows,
        "control": {"kl_max": rows[1]["kl_max"]},
    }


def _write(folder: Path, result: dict[str, Any], infos, series, encoded, tokens) -> None:
    """kl.json last: a folder that has it has everything."""
    write_atomic(folder / "kl.parquet", _parquet(infos, series, encoded))
    curves = [_curve(one) for one in _usable(series, tokens)]
    figure = report.kl_figure(result, curves)
    for kind in ("png", "svg"):
        write_atomic(folder / f"kl.{kind}", figure[kind])
    write_atomic(folder / "report.md", report.kl_markdown(result))
    write_atomic(folder / "report.html", report.kl_html(result, figure["svg"].decode()))
    write_json(folder / "kl.json", result)


def _curve(one: _Series) -> dict[str, np.ndarray]:
    return {name: one.get(name) for name in ("kl", "same_top1", "nll")}


def _parquet(infos, series, encoded) -> bytes:
    """The per-token file: one line per book, row and position; equal runs give equal bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("book", pa.int32()),
            ("row", pa.int32()),
            ("scheme", pa.dictionary(pa.int32(), pa.string())),
            ("seed", pa.int64()),
            ("role", pa.dictionary(pa.int32(), pa.string())),
            ("position", pa.int32()),
            ("token", pa.int32()),
            ("kl", pa.float32()),
            ("same_top1", pa.bool_()),
            ("nll", pa.float32()),
            ("entropy", pa.float32()),
        ]
    )
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for book, (one, ids) in enumerate(zip(series, encoded, strict=False)):
            if not one.parts:
                continue
            values = {name: one.get(name) for name in ("kl", "same_top1", "nll", "entropy")}
            tokens = values["kl"].shape[1]
            for row, info in enumerate(infos):
                constant = {"book": book, "row": row, "scheme": str(info.scheme), "seed": info.seed, "role": info.role}
                columns = {k: pa.array([v] * tokens, schema.field(k).type) for k, v in constant.items()}
                columns |= {
                    "position": pa.array(np.arange(tokens, dtype=np.int32)),
                    "token": pa.array(ids[:tokens].numpy().astype(np.int32)),
                }
                columns |= {name: pa.array(array[row]) for name, array in values.items()}
                writer.write_table(pa.table([columns[f.name] for f in schema], schema=schema))
    return sink.getvalue()


def _fingerprint(options: KlOptions, infos, encoded, loaded: Loaded) -> str:
    """Changes with anything that changes a number: parts of another run are never mixed in."""
    text = hashlib.sha256(b"".join(ids.numpy().tobytes() for ids in encoded)).hexdigest()
    rows = [(str(i.scheme), i.seed) for i in infos]
    what = [loaded.info, options.tokens, options.prompt_tokens, options.chunk_size, options.follow_hf_clamp, rows, text, torch.__version__]
    return hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()
