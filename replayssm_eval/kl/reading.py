"""Reading: the books go through the model chunk by chunk, all rows side by side, and every chunk is kept on disk."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from replayssm_emulation import RunError, UsageError
from replayssm_kernels import BatchRow, compiled_kernels
from torch import Tensor

from ..inference.attach import attach
from ..inference.forward import hidden_states, hidden_states_by_token, layer_devices, new_cache
from ..inference.metrics import TokenMetrics, compare_hidden
from ..inference.session import Session
from ..models.loading import Loaded
from ..results.progress import OnProgress, Progress
from .checkpoint import Checkpoint
from .corpus import Book
from .options import KlOptions
from .result import LayerManifest, Timing
from .rows import RunRow
from .series import Series
from .statistics import mean


@dataclass
class Readings:
    """What was read so far. It grows while the books are read.

    series: per book. manifest: of every state layer, after the newest chunk. problems: one sentence each.
    nonfinite_rows: rows that are not finite somewhere. interrupted: whether the reading was stopped before its end.
    """

    series: list[Series]
    manifest: Sequence[LayerManifest] = ()
    problems: list[str] = field(default_factory=list)
    nonfinite_rows: set[int] = field(default_factory=set)
    backend: str = ""
    timing: Timing = field(default_factory=Timing)
    interrupted: bool = False


def encode(tokenizer: Callable[..., Any], book: Book, tokens: int) -> Tensor:
    """The first `tokens` token ids and, where the book goes on, the one after them (the last target).

    Raises UsageError for a book that is too short.
    """
    ids = tokenizer(book.text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < tokens:
        raise UsageError(f"{book.source}: --tokens {tokens} is more than the book has: {len(ids)} tokens")
    return torch.tensor(ids[: tokens + 1])


class Reader:
    """Reads the books of one run, from where `readings` ends."""

    def __init__(
        self,
        options: KlOptions,
        loaded: Loaded,
        titles: Sequence[str],
        ids: Sequence[Tensor],
        rows: Sequence[RunRow],
        checkpoint: Checkpoint,
        progress: OnProgress,
    ):
        self.options, self.model, self.titles, self.ids, self.rows = options, loaded.model, titles, ids, rows
        self.checkpoint, self.progress = checkpoint, progress

    def read(self, readings: Readings) -> None:
        """Read what is missing. After an interrupt keeps what was read, if that is a chunk or more."""
        try:
            self._read_books(readings)
        except KeyboardInterrupt:
            if not any(one.chunks for one in readings.series):
                raise
            readings.interrupted = True

    def _read_books(self, readings: Readings) -> None:
        options, began = self.options, time.monotonic()
        with attach(
            self.model,
            [row.scheme for row in self.rows],
            follow_hf_clamp=options.follow_hf_clamp,
            backend=options.backend,
        ) as session:
            readings.backend = session.backend
            if session.backend == "triton":
                readings.timing = Timing(compiled_kernels(), round(time.monotonic() - began, 2))
            began = time.monotonic()
            for document in range(len(self.titles)):
                if document == len(readings.series):
                    readings.series.append(Series())
                if readings.series[document].tokens < options.tokens:
                    prompt = options.prompt_tokens
                    session.start([BatchRow(row.scheme, row.seed, document, prompt) for row in self.rows])
                    self._read_book(session, document, readings)
                    readings.timing = replace(readings.timing, reading_s=round(time.monotonic() - began, 2))

    def _read_book(self, session: Session, document: int, readings: Readings) -> None:
        """Go on with one book, chunk by chunk, from where its series ends."""
        model, ids, series = self.model, self.ids[document], readings.series[document]
        tokens, prompt = self.options.tokens, self.options.prompt_tokens
        cache = new_cache(model, tokens)
        if series.tokens:
            self.checkpoint.load_state(session, cache, layer_devices(model))
        targets = torch.full((tokens,), -1)
        targets[: len(ids) - 1] = ids[1 : tokens + 1]
        head = model.get_output_embeddings()
        forward = hidden_states if self.options.engine == "scan" else hidden_states_by_token
        due = [row.count_flushes(prompt, 0, series.tokens) for row in self.rows]
        with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
            for position in range(series.tokens, tokens, self.options.chunk_size):
                stop = min(position + self.options.chunk_size, tokens)
                batch = ids[position:stop].to(model.device).expand(len(self.rows), -1)
                hidden = forward(model, batch, cache, position)
                metrics = compare_hidden(hidden, head, targets[position:stop], session.backend)
                self._check_progress(session, document, stop)
                due = [n + row.count_flushes(prompt, position, stop) for n, row in zip(due, self.rows, strict=True)]
                session.check_rounding(due)
                series.chunks.append(metrics)
                manifest = session.manifest(cache)
                readings.manifest = [LayerManifest.read(entry) for entry in manifest]
                self.checkpoint.save_chunk(document, position, metrics, manifest)
                if stop < tokens:
                    self.checkpoint.save_state(document, stop, session, cache)
                self._note_nonfinite(metrics, session, position, document, readings)
                self._report_progress(metrics, document, stop)
                if 0 in readings.nonfinite_rows:
                    break  # without a reference nothing can be compared

    def _check_progress(self, session: Session, document: int, stop: int) -> None:
        if session.tokens != stop:
            raise RunError(
                f"{self.titles[document]}: the state layers have seen {session.tokens} tokens "
                f"where the text is at {stop}"
            )

    def _note_nonfinite(
        self, metrics: TokenMetrics, session: Session, position: int, document: int, readings: Readings
    ) -> None:
        """The first non-finite KL of every row becomes one line that says where it came from."""
        for index, row in enumerate(self.rows):
            nonfinite = np.flatnonzero(~np.isfinite(metrics.kl[index]))
            if index in readings.nonfinite_rows or not nonfinite.size:
                continue
            readings.nonfinite_rows.add(index)
            layer = session.first_nonfinite_layer(index)
            place = "the output head" if layer is None else f"state layer {layer}"
            readings.problems.append(
                f"{self.titles[document]}: {row.name} is not finite from position {position + int(nonfinite[0])} on, "
                f"first seen in {place}"
            )

    def _report_progress(self, metrics: TokenMetrics, document: int, stop: int) -> None:
        tokens = self.options.tokens
        newest = {row.label: mean(metrics.kl[i]) or 0.0 for i, row in enumerate(self.rows) if row.role == "scheme"}
        self.progress(Progress(self.titles[document], document * tokens + stop, len(self.titles) * tokens, newest))
