"""lm-eval sample logs, ours or anyone's: from files and folders to rows.

lm-eval 0.4.13 with --log_samples writes samples_TASK_TIME.jsonl, one row per document and filter: doc_id, resps,
filtered_resps, filter, metrics, doc_hash, prompt_hash, target_hash and one key per metric (its evaluator.py and
loggers/evaluation_tracker.py). Older versions and other tools write a JSON list, unnested resps or no filter name.
Keys of our own, each optional: tokens (generated, thinking included), stop ("eos", "stop" or "length"), looped,
extracted, repeat. With several answers in a row they are lists, one entry per answer. raw and status are for people.
"""

import fnmatch
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replayssm_emulation import UsageError

_NAME = re.compile(r"samples_(?P<task>.+?)(?:_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+))?\.jsonl?")
_UNUSED = ("doc", "arguments")  # most of a log's bytes


@dataclass(frozen=True)
class SampleRow:
    """One row and where it stands. task: only where several tasks are pooled, else ""."""

    file: Path
    line: int
    task: str
    values: dict[str, Any]

    @property
    def source(self) -> str:
        return f"{self.file} line {self.line}"


@dataclass
class Log:
    """The rows of one arm as they are in its files. notes: what was chosen or left out, for the reader."""

    name: str
    path: Path
    task: str
    files: dict[Path, str]  # SHA-256 of each
    rows: list[SampleRow]
    cut: int = 0
    filters: dict[str | None, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_log(path: Path, name: str, task: str | None = None, allow_cut: bool = False) -> Log:
    """The rows of a file, or of the newest file of each chosen task in a folder.

    task: a task's name, or a shell pattern (`leaderboard_math_*`) that pools several. allow_cut: leave out a last line
    that is not whole. Raises UsageError with the file and line of what is wrong.
    """
    chosen, notes = ([(task or _parse_name(path)[0], path)], []) if path.is_file() else _find(path, task)
    tasks = sorted({t for t, _ in chosen})
    log = Log(name, path, tasks[0] if len(tasks) == 1 else str(task), {}, [], notes=notes)
    for file_task, file in chosen:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
        log.files[file] = hashlib.sha256(data).hexdigest()
        for line, row in _rows(file, data):
            if row is None:
                if not allow_cut:
                    raise UsageError(
                        f"{file} line {line}: cut off: the run that wrote it did not end; "
                        "pass --allow-cut to leave it out"
                    )
                log.cut += 1
                continue
            kept = {key: value for key, value in row.items() if key not in _UNUSED}
            log.rows.append(SampleRow(file, line, file_task if len(tasks) > 1 else "", kept))
    if not log.rows:
        raise UsageError(f"{path}: no samples in it")
    log.filters = dict(Counter(filter_of(row) for row in log.rows))
    if None in log.filters and len(log.filters) > 1:
        bare = next(row for row in log.rows if filter_of(row) is None)
        raise UsageError(f"{bare.source}: has no filter name, other rows have one")
    return log


def _parse_name(path: Path) -> tuple[str, str]:
    """(task, time) of a file that lm-eval named; (stem, "") of any other."""
    match = _NAME.fullmatch(path.name)
    return (match["task"], match["date"] or "") if match else (path.stem, "")


def _find(folder: Path, wanted: str | None) -> tuple[list[tuple[str, Path]], list[str]]:
    """(task, newest file) of the chosen tasks below `folder`, and notes."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such file or folder")
    found: dict[str, list[Path]] = {}
    for path in sorted(p for ending in ("jsonl", "json") for p in folder.rglob(f"samples_*.{ending}")):
        found.setdefault(_parse_name(path)[0], []).append(path)
    if not found:
        raise UsageError(f"{folder}: no samples_*.jsonl in it (lm-eval writes them with --log_samples)")
    tasks = sorted(found) if wanted is None else [wanted] if wanted in found else fnmatch.filter(sorted(found), wanted)
    if not tasks or (len(tasks) > 1 and wanted is None):
        what = "several tasks" if wanted is None else f"no task {wanted}"
        raise UsageError(
            f"{folder}: {what}; it has {', '.join(sorted(found))}; "
            "choose with --task (a pattern such as 'math_*' pools several)"
        )
    chosen, notes = [], []
    for task in tasks:
        folders = sorted({str(p.parent) for p in found[task]})
        if len(folders) > 1:
            raise UsageError(f"{folder}: samples of {task} from several runs: pass one of {', '.join(folders)}")
        newest = max(found[task], key=lambda p: _parse_name(p)[1])
        if len(found[task]) > 1:
            notes.append(f"{newest}: the newest of {len(found[task])} files of {task} in {folders[0]}")
        chosen.append((task, newest))
    return chosen, notes


def _rows(file: Path, data: bytes) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(line number, row) of JSONL or of a JSON list; None for a last row that is not whole.

    Lines end at \\n alone: U+2028 and its like stand unescaped inside lm-eval's strings. Half surrogates are read
    (surrogatepass) and replaced later, where text is used.
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    if data.lstrip()[:1] == b"[":
        yield from _list_rows(file, data)
        return
    lines = data.split(b"\n")
    last = max((i for i, line in enumerate(lines) if line.strip()), default=-1)
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8", "surrogatepass"))
        except ValueError as error:  # UnicodeDecodeError is one
            if i == last and line.lstrip().startswith(b"{"):
                yield i + 1, None
                continue
            raise UsageError(f"{file} line {i + 1}: not JSON ({' '.join(str(error).split())[:120]})") from None
        yield i + 1, _checked(row, file, i + 1)


def _list_rows(file: Path, data: bytes) -> Iterator[tuple[int, dict[str, Any] | None]]:
    try:
        text = data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        if error.end < len(data):
            line = data.count(b"\n", 0, error.start) + 1
            raise UsageError(f"{file} line {line}: byte {error.start} is not UTF-8") from None
        text = data[: error.start].decode("utf-8", "surrogatepass")  # cut inside a character
    decoder, blank = json.JSONDecoder(), re.compile(r"[\s,]*")
    at, line = text.index("[") + 1, 1
    counted = 0
    while True:
        match = blank.match(text, at)
        at = match.end() if match else at
        line, counted = line + text.count("\n", counted, at), at
        if text[at : at + 1] == "]":
            return
        if at == len(text):
            yield line, None
            return
        try:
            row, at = decoder.raw_decode(text, at)
        except ValueError as error:
            # Cut if the parser came to the end of the file; an error before it is damage.
            if "Unterminated string" in str(error) or re.fullmatch(r"[\\\w.+-]*\s*", text[getattr(error, "pos", 0) :]):
                yield line, None
                return
            raise UsageError(f"{file} line {line}: not JSON ({' '.join(str(error).split())[:120]})") from None
        yield line, _checked(row, file, line)


def _checked(row: Any, file: Path, line: int) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UsageError(f"{file} line {line}: not a JSON object")
    if row.get("doc_id") is None and row.get("doc_hash") is None:
        raise UsageError(f"{file} line {line}: neither doc_id nor doc_hash: not an lm-eval sample")
    return row


def clean(text: str) -> str:
    """`text` with half surrogates as U+FFFD: they can be neither written nor tokenized."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def filter_of(row: SampleRow) -> str | None:
    """The row's filter; None where the log names none."""
    name = row.values.get("filter")
    return None if name is None else clean(str(name))


def choose_filter(logs: Sequence[Log], wanted: str | None) -> str | None:
    """The filter whose rows count: `wanted`, or the only one. None when no row names its filter."""
    names = {name for log in logs for name in log.filters if name is not None}
    listing = "; ".join(
        f"{log.name}: " + ", ".join(f"{f or 'no name'} ({n} rows)" for f, n in log.filters.items()) for log in logs
    )
    if wanted is None:
        if len(names) > 1:
            raise UsageError(f"several filters, choose one with --filter: {listing}")
        return next(iter(names), None)
    missing = next((log.name for log in logs if None not in log.filters and wanted not in log.filters), None)
    if missing:
        raise UsageError(f"--filter {wanted}: {missing} has no such rows: {listing}")
    return wanted
