"""One record per question and arm from the rows of a sample log: scores, lengths and how the answers ended."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from replayssm_emulation import UsageError
from replayssm_tasks.loops import loops

from .sample_log import Log, SampleRow, clean, filter_of

_NOT_METRICS = {
    *(
        "doc",
        "target",
        "arguments",
        "doc_id",
        "doc_hash",
        "prompt_hash",
        "target_hash",
        "filter",
        "resps",
        "filtered_resps",
        "metrics",
    ),
    *("tokens", "stop", "looped", "extracted", "repeat", "raw", "status"),
}
_NOTHING = {"[invalid]", ""}  # lm-eval's regex filters put the first where nothing matches


@dataclass(frozen=True)
class Record:
    """The answers to one question in one arm.

    scores: in [0, 1], NaN for none; one per answer, or one for all. texts, tokens, truncated, looped: one per answer;
    None where the log does not say. extracted: one per filtered response, empty where the log does not say.
    overruled: answers that were scored right although nothing was extracted; their scores are 0 here.
    """

    file: Path
    line: int
    task: str
    doc_id: str | None
    doc_hash: str | None
    prompt_hash: str | None
    target_hash: str | None
    scores: tuple[float, ...]
    texts: tuple[str | None, ...]
    tokens: tuple[float | None, ...]
    extracted: tuple[bool, ...]
    truncated: tuple[bool | None, ...]
    looped: tuple[bool | None, ...]
    overruled: int

    @property
    def source(self) -> str:
        return f"{self.file} line {self.line}"

    @property
    def score(self) -> float:
        """Mean of the scores that there are; NaN when there is none."""
        known = [s for s in self.scores if not math.isnan(s)]
        return sum(known) / len(known) if known else math.nan

    @property
    def label(self) -> str:
        name = self.doc_id if self.doc_id is not None else str(self.doc_hash)[:12]
        return f"{self.task}/{name}" if self.task else name


_PER_ANSWER = ("scores", "texts", "tokens", "extracted", "truncated", "looped")


def choose_metric(log: Log, filter_name: str | None, wanted: str | None) -> str:
    """`wanted`, else exact_match, else the only key of the rows whose values are all 0, 1 or missing."""
    if wanted is not None:
        return wanted
    rows = [row.values for row in log.rows if filter_of(row) in (None, filter_name)]
    if any("exact_match" in row for row in rows):
        return "exact_match"
    keys = sorted({key for row in rows for key in row} - _NOT_METRICS)
    fitting = [key for key in keys if all(_zero_or_one(row.get(key)) for row in rows)]
    if len(fitting) == 1:
        return fitting[0]
    how_many = "several metrics" if fitting else "no metric"
    raise UsageError(
        f"{log.path}: no exact_match and {how_many} of 0 and 1; choose with --metric: {', '.join(keys) or 'none there'}"
    )


def _zero_or_one(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and (value in (0, 1) or math.isnan(value)))


def records(log: Log, filter_name: str | None, metric: str) -> tuple[list[Record], int]:
    """(one record per question, dropped rows) from the rows with that filter, or without any filter name.

    Rows of one document that differ in `repeat` answer one question several times. A row that says the same as an
    earlier one (padding of a multi-process run) is dropped; one that contradicts it is an error.
    """
    seen: dict[tuple[str, ...], Record] = {}
    merged: dict[tuple[str, ...], Record] = {}
    dropped = 0
    for row in log.rows:
        if filter_of(row) not in (None, filter_name):
            continue
        record = _record(row, metric)
        question = (record.task, str(record.doc_hash if record.doc_id is None else record.doc_id))
        earlier = seen.setdefault((*question, str(row.values.get("repeat"))), record)
        if earlier is not record:
            if _content(earlier) != _content(record):
                lines = f"lines {earlier.line} and" if earlier.file == record.file else f"{earlier.source} and line"
                hint = "; two filters without names?" if earlier.texts == record.texts else ""
                raise UsageError(
                    f"{record.file} {lines} {record.line}: document {record.label} is there twice and differs{hint}"
                )
            dropped += 1
        else:
            first = merged.get(question)
            merged[question] = record if first is None else _joined(first, record)
    return list(merged.values()), dropped


def _content(record: Record) -> str:
    """Everything but the place; as text, because NaN differs from itself."""
    return repr([getattr(record, f.name) for f in fields(record) if f.name not in ("file", "line")])


def _joined(a: Record, b: Record) -> Record:
    """Two repeats of one question."""
    if (a.doc_hash, a.prompt_hash, a.target_hash) != (b.doc_hash, b.prompt_hash, b.target_hash):
        raise UsageError(f"{a.source} and {b.source}: repeats of document {a.label} ask different questions")
    values = {f.name: getattr(a, f.name) for f in fields(a)} | {
        name: getattr(a, name) + getattr(b, name) for name in _PER_ANSWER
    }
    return Record(**values | {"overruled": a.overruled + b.overruled})


def _record(row: SampleRow, metric: str) -> Record:
    values, where = row.values, row.source
    if metric not in values:
        known = ", ".join(sorted(set(values) - _NOT_METRICS)) or "none"
        raise UsageError(f"{where}: no metric {metric}; it has {known}; choose with --metric")
    if "resps" not in values and "tokens" not in values:
        raise UsageError(f"{where}: no resps: not an lm-eval sample of a generation task")
    texts = tuple(_text(leaf, where) for leaf in _leaves(values.get("resps"), where))
    scored = _scores(values[metric], f"{where}: {metric}")
    extracted = _extracted(values, scored)
    # With one score for several answers, or the reverse, only "nothing at all was extracted" tells about a score.
    usable = extracted if len(extracted) == len(scored) else (any(extracted) or not extracted,) * len(scored)
    scores = tuple(score if good or math.isnan(score) else 0.0 for score, good in zip(scored, usable, strict=True))
    flags = _each(values, "looped", len(texts), where)
    identity = {
        key: None if values.get(key) is None else clean(str(values[key]))
        for key in ("doc_id", "doc_hash", "prompt_hash", "target_hash")
    }
    return Record(
        row.file,
        row.line,
        row.task,
        **identity,
        scores=scores,
        texts=texts,
        tokens=tuple(_tokens(value, where) for value in _each(values, "tokens", len(texts), where)),
        extracted=extracted,
        truncated=tuple(
            None if stop is None else stop == "length" for stop in _each(values, "stop", len(texts), where)
        ),
        looped=tuple(
            bool(flag) if flag is not None else None if t is None else loops(t)
            for flag, t in zip(flags, texts, strict=True)
        ),
        overruled=sum(a != b for a, b in zip(scored, scores, strict=True) if not math.isnan(a)),
    )


def _leaves(value: Any, where: str = "") -> list[Any]:
    """Responses out of x, [x], [[x]] or [[x, y]]."""
    if not isinstance(value, list):
        return [value]
    if len(value) == 2 and str(value[1]) in ("True", "False") and _is_number(value[0]):
        raise UsageError(
            f"{where}: a log-likelihood, not an answer: multiple-choice tasks generate nothing that has a length"
        )
    return [leaf for item in value for leaf in _leaves(item, where)]


def _is_number(value: Any) -> bool:
    try:
        return float(value) <= 0
    except (TypeError, ValueError):
        return False


def _text(leaf: Any, where: str) -> str | None:
    if leaf is None or isinstance(leaf, str):
        return None if leaf is None else clean(leaf)
    raise UsageError(f"{where}: a response is not text but {type(leaf).__name__}")


def _scores(value: Any, where: str) -> tuple[float, ...]:
    """Numbers in [0, 1]; NaN for null, NaN and nothing. lm-eval writes what JSON lacks (Decimal) as text."""
    out = []
    for item in value if isinstance(value, list) else [value]:
        try:
            score = math.nan if item is None else float(item)
        except (TypeError, ValueError):
            raise UsageError(f"{where}: {item!r} is not a score; choose another with --metric") from None
        if not (math.isnan(score) or 0 <= score <= 1):
            raise UsageError(f"{where}: {item!r} is not a score in [0, 1]; choose another with --metric")
        out.append(score)
    return tuple(out) or (math.nan,)


def _extracted(values: dict[str, Any], scores: Sequence[float]) -> tuple[bool, ...]:
    """Whether an answer was found, for every filtered response: our own flag, or what the filter left."""
    flags = values.get("extracted")
    if flags is not None:
        return tuple(bool(flag) for flag in (flags if isinstance(flags, list) else [flags]))
    if "filtered_resps" not in values:
        return ()
    found = []
    for leaf in _leaves(values["filtered_resps"]) or [None]:
        text = leaf.strip() if isinstance(leaf, str) else leaf
        # lm-eval logs a filter's None as "None", which can also be an answer: then it has a score.
        found.append(any(s > 0 for s in scores) if text == "None" else text is not None and text not in _NOTHING)
    return tuple(found)


def _each(values: dict[str, Any], key: str, answers: int, where: str) -> Sequence[Any]:
    """One value of `key` per answer; None for each where there is none."""
    value = values.get(key)
    out = value if isinstance(value, list) else [value] * (answers if value is None else 1)
    if len(out) != answers:
        raise UsageError(f"{where}: {len(out)} values of {key} for {answers} answers")
    return out


def _tokens(value: Any, where: str) -> float | None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UsageError(f"{where}: tokens {value!r} is not a count")
    return float(value)
