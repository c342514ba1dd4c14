"""Books from everywhere a user keeps them, and one clear line for everything that is not one (cases D1, D2)."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from replayssm_emulation import UsageError
from replayssm_tasks import hub

from replayssm_eval.kl.corpus import BUILTIN, load_books


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_builtin_books() -> None:
    books = load_books("builtin", list(BUILTIN))
    assert [b.title for b in books] == ["moby-dick", "persuasion"]
    assert all(len(b.text) > 400_000 for b in books)
    assert load_books("builtin")[0].title == "moby-dick"
    assert load_books("builtin", ["1"])[0].title == "persuasion"
    assert load_books("builtin", ["Moby"])[0].title == "moby-dick"


def test_local_files_of_every_kind(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("the first")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"the second", mtime=0))
    write_jsonl(tmp_path / "c.jsonl", {"book_id": "1", "book_title": "Third", "book_text": "the third"})
    table = {"short_book_title": ["Fourth"], "publication_date": [1900], "url": ["u"], "text": ["the fourth"]}
    pq.write_table(pa.table(table), tmp_path / "d.parquet")
    books = load_books(str(tmp_path), ["0", "1", "2", "3"])
    assert [(b.title, b.text) for b in books] == [
        ("a", "the first"),
        ("b", "the second"),
        ("Third", "the third"),
        ("Fourth", "the fourth"),
    ]
    assert load_books(str(tmp_path / "d.parquet"))[0].title == "Fourth"
    assert load_books(write_jsonl(tmp_path / "e.jsonl", {"content": "x y"}), text_key="content")[0].text == "x y"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("bad.txt", b"good start \xff bad", r"bad\.txt: byte 11 \(0xff\) is not UTF-8"),
        ("bad.jsonl", b'{"text": "ok"}\n{"text": \xe9}\n', r"bad\.jsonl: byte 24 \(0xe9\) is not UTF-8"),
        ("empty.txt", b"", "the book is empty"),
        ("blank.txt", b" \n\n", "the book is empty"),
        ("empty.jsonl", b"", "has no book '0'; it has 0"),
        (
            "keys.jsonl",
            b'{"content": "x", "id": 3}\n',
            "no text key text or book_text; found content, id; name it with --text-key",
        ),
        ("number.jsonl", b'{"text": 3}\n', "text is not text but int"),
        ("cut.jsonl", b'{"text": "ok"', "line 1: not JSON"),
        ("list.jsonl", b"[1]\n", "line 1: not a JSON object"),
        ("not.parquet", b"plain", "not a whole Parquet file"),
        ("cut.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:20], "cannot be read"),
        ("bad.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:10] + b"\xff" * 40, "cannot be read"),
        ("surrogate.jsonl", b'{"text": "a \\ud835 b"}\n', "character 2 is half of a surrogate pair"),
        ("x.docx", b"", "unknown kind of file"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, says) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=says) as caught:
        load_books(str(path))
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_and_crlf_and_blank_lines(tmp_path) -> None:
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbftext\r\n")
    assert load_books(str(tmp_path / "bom.txt"))[0].text == "text\r\n"
    (tmp_path / "bom.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n')
    assert [b.text for b in load_books(str(tmp_path / "bom.jsonl"), ["0", "1"])] == ["a", "b"]


def test_a_whole_title_beats_an_index_and_a_part(tmp_path) -> None:
    path = write_jsonl(tmp_path / "b.jsonl", *({"title": t, "text": t} for t in ("a dilemma", "Emma", "1")))
    assert [b.text for b in load_books(path, ["emma", "1", "dilem", "0"][:3])] == ["Emma", "1", "a dilemma"]
    for twice in (["0", "dilem"], ["emma", "emma"]):
        with pytest.raises(UsageError, match="same book|asked for twice"):
            load_books(path, twice)


def test_missing_paths_and_books(tmp_path) -> None:
    with pytest.raises(UsageError, match="nowhere: no such file or folder"):
        load_books(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"no \.txt"):
        load_books(str(tmp_path))
    with pytest.raises(UsageError, match="no book 'emma'; it has 2: moby-dick, persuasion"):
        load_books("builtin", ["emma"])


def test_script_data_set_is_refused_with_an_alternative() -> None:
    with pytest.raises(UsageError, match="script data set.*--corpus pg19.*local folder"):
        load_books("deepmind/pg19")


def test_pg19_without_network(monkeypatch) -> None:
    """D2: seconds, not retries; and never zero documents reported as success."""
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)
    with pytest.raises(UsageError, match="emozilla/pg19.*cannot be reached.*--corpus builtin"):
        load_books("pg19")


def test_local_corpus_needs_no_network(tmp_path, monkeypatch) -> None:
    """D2: a local folder never asks the network anything."""
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError("network was asked")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    (tmp_path / "a.txt").write_text("text")
    assert load_books(str(tmp_path))[0].text == "text"


def test_pg19_streams_only_what_is_asked(monkeypatch) -> None:
    import datasets

    drawn = []

    def rows():
        for i in range(100):
            drawn.append(i)
            yield {"short_book_title": f"Book {i}", "publication_date": 1900, "url": "u", "text": f"text {i}"}

    monkeypatch.setattr(hub, "hub_reachable", lambda: True)
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, split, streaming: rows() if (name, split, streaming) == ("emozilla/pg19", "test", True) else None,
    )
    assert [b.text for b in load_books("pg19", ["2", "Book 1"])] == ["text 2", "text 1"]
    assert len(drawn) == 3


def test_a_stream_that_breaks_is_one_line(monkeypatch) -> None:
    import datasets

    def rows():
        yield {"text": "first"}
        raise ConnectionError("gone")

    monkeypatch.setattr(hub, "hub_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows())
    with pytest.raises(UsageError, match="cannot be read at row 1: gone; pass"):
        load_books("pg19", ["1"])
