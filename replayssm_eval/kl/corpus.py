"""Books to read: built in, PG-19 from the hub, or text / JSONL / Parquet files and folders."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from replayssm_emulation import UsageError
from replayssm_emulation.errors import require

BUILTIN = {"moby-dick": "moby_dick_1851.txt.gz", "persuasion": "persuasion.txt.gz"}
_ASSETS = Path(__file__).parents[1] / "assets" / "books"
_TEXT_KEYS = ("text", "book_text")
_TITLE_KEYS = ("short_book_title", "book_title", "title", "book_id", "id")
_SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
PG19 = "emozilla/pg19"


@dataclass(frozen=True)
class Book:
    """One document. source: where it came from, for messages and provenance."""

    title: str
    text: str
    source: str


def load_books(
    corpus: str, books: list[str] | None = None, split: str = "test", text_key: str | None = None
) -> list[Book]:
    """The books of `corpus`: "builtin", "pg19", a file or a folder.

    books: titles (or parts of titles) or 0-based indices, in the order wanted; default the first book. split: of PG-19.
    text_key: the key or column that holds the text, when it is none of the usual ones.
    Raises UsageError naming the file and what is wrong with it; nothing is ever padded, joined or skipped silently.
    """
    wanted = books or ["0"]
    if corpus == "builtin":
        available: Iterator[Book] = (_text_book(_ASSETS / file, title) for title, file in BUILTIN.items())
    elif corpus == "pg19":
        available = _pg19(split)
    elif corpus == "deepmind/pg19":
        raise UsageError(
            "deepmind/pg19 is a script data set, which datasets >= 4 cannot load: "
            f"use --corpus pg19 ({PG19}) or a local folder"
        )
    else:
        available = _local(Path(corpus), text_key)
    chosen = _choose(available, wanted, corpus)
    for book in chosen:
        if not book.text.strip():
            raise UsageError(f"{book.source}: the book is empty")
        try:
            book.text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{book.source}: character {error.start} is half of a surrogate pair, not text") from None
    return chosen


def _choose(available: Iterator[Book], wanted: list[str], corpus: str) -> list[Book]:
    """Reads only as far as needed: a stream of books is long. A whole title beats an index, and that a part of one."""
    if repeated := [want for want in wanted if wanted.count(want) > 1]:
        raise UsageError(f"book {repeated[0]!r} is asked for twice")
    found: dict[str, tuple[int, int, Book]] = {}  # wish -> (quality of the match, index, book)
    titles: list[str] = []
    for index, book in enumerate(available):
        titles.append(book.title)
        for want in wanted:
            quality = _match(want, index, book.title)
            if quality > found.get(want, (0, 0, book))[0]:
                found[want] = (quality, index, book)
        certain = all(want in found and found[want][0] >= (2 if _is_index(want) else 3) for want in wanted)
        if certain:
            break
    if len(found) == len(wanted):
        by_index: dict[int, str] = {}
        for want, (_, index, book) in found.items():
            if index in by_index:
                raise UsageError(f"{by_index[index]!r} and {want!r} are the same book, {book.title!r}")
            by_index[index] = want
        return [found[want][2] for want in wanted]
    missing = next(want for want in wanted if want not in found)
    listing = ", ".join(titles[:8]) + (", ..." if len(titles) > 8 else "")
    raise UsageError(f"corpus {corpus} has no book {missing!r}; it has {len(titles)}: {listing}")


def _is_index(want: str) -> bool:
    return want.isascii() and want.isdecimal()


def _match(want: str, index: int, title: str) -> int:
    """3 the whole title, 2 the index, 1 part of the title, 0 no match."""
    if want.lower() == title.lower():
        return 3
    if _is_index(want):
        return 2 if index == int(want) else 0
    return 1 if want.lower() in title.lower() else 0


def decode_utf8(data: bytes, source: str) -> str:
    """UTF-8 text of `data`, without a byte-order mark.

    Raises UsageError with the file and the offset of the first bad byte.
    """
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source}: byte {error.start} (0x{data[error.start]:02x}) is not UTF-8; convert the file first"
        ) from None


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from None


def _text_book(path: Path, title: str | None = None) -> Book:
    return Book(title or path.name.split(".")[0], decode_utf8(_read(path), str(path)), str(path))


def _local(path: Path, text_key: str | None) -> Iterator[Book]:
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.name.endswith(_SUFFIXES))
        if not files:
            raise UsageError(f"{path}: no {', '.join(_SUFFIXES)} file in this folder")
        for file in files:
            yield from _local(file, text_key)
    elif not path.exists():
        raise UsageError(f"{path}: no such file or folder (a corpus is builtin, pg19 or a path)")
    elif path.name.endswith((".txt", ".txt.gz")):
        yield _text_book(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _jsonl(path, text_key)
    elif path.suffix == ".parquet":
        yield from _parquet(path, text_key)
    else:
        raise UsageError(f"{path}: unknown kind of file; use {', '.join(_SUFFIXES)}")


def _from_row(row: dict, source: str, text_key: str | None, index: int) -> Book:
    key = text_key or next((k for k in _TEXT_KEYS if k in row), None)
    if key is None or key not in row:
        raise UsageError(
            f"{source}: no text key {text_key or ' or '.join(_TEXT_KEYS)}; found {', '.join(row)}; "
            "name it with --text-key"
        )
    if not isinstance(row[key], str):
        raise UsageError(f"{source}: {key} is not text but {type(row[key]).__name__}")
    title = next((str(row[k]) for k in _TITLE_KEYS if row.get(k)), str(index))
    return Book(title, row[key], source)


def _jsonl(path: Path, text_key: str | None) -> Iterator[Book]:
    index = 0
    for number, line in enumerate(decode_utf8(_read(path), str(path)).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path} line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise UsageError(f"{path} line {number}: not a JSON object")
        yield _from_row(row, f"{path} line {number}", text_key, index)
        index += 1


def _parquet(path: Path, text_key: str | None) -> Iterator[Book]:
    import pyarrow
    import pyarrow.parquet

    index = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1):
            for row in batch.to_pylist():
                yield _from_row(row, f"{path} row {index}", text_key, index)
                index += 1
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path}: not a whole Parquet file ({' '.join(str(error).split())[:200]})") from None


def _pg19(split: str) -> Iterator[Book]:
    require("datasets", "pg19", "--corpus pg19")
    from datasets import load_dataset
    from replayssm_tasks.hub import hub_reachable

    advice = "pass --corpus builtin, or a local file or folder"
    if not hub_reachable():
        raise UsageError(f"data set {PG19} ({split}) cannot be reached: the hub does not answer; {advice}")
    index = 0
    try:
        for row in load_dataset(PG19, split=split, streaming=True):
            yield _from_row(row, f"{PG19} {split} row {index}", None, index)
            index += 1
    except UsageError:
        raise
    except Exception as error:  # the hub client raises many kinds, all meaning "not to be had"
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UsageError(f"data set {PG19} ({split}) cannot be read at row {index}: {reason}; {advice}") from None
