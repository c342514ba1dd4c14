"""Sample logs as met in the wild (E3, E7): every form gives the same table, every fault is named with its line."""

import hashlib
import json

import numpy as np
import pytest
from replayssm_emulation import UsageError
from replayssm_tasks.loops import loops

from replayssm_eval.models.loading import location_of
from replayssm_eval.quartiles.pairing import lengths, pair
from replayssm_eval.quartiles.records import choose_metric, records
from replayssm_eval.quartiles.run import evaluate
from replayssm_eval.quartiles.sample_log import choose_filter, read_log


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def sample(i, score=1.0, text=None, **more):
    """One row as lm-eval 0.4.13 writes it, our token count added."""
    text = f"so the answer is {i}" if text is None else text
    return {
        "doc_id": i,
        "doc": {"question": f"question {i}"},
        "target": str(i),
        "arguments": {"gen_args_0": {"arg_0": f"question {i}"}},
        "resps": [[text]],
        "filtered_resps": [str(i)],
        "filter": "strict-match",
        "metrics": ["exact_match"],
        "doc_hash": sha(f"doc {i}"),
        "prompt_hash": sha(f"prompt {i}"),
        "target_hash": sha(str(i)),
        "exact_match": score,
        "tokens": 10 * (i + 1),
    } | more


def without(row, *keys):
    return {key: value for key, value in row.items() if key not in keys}


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path, filter_name="strict-match", **options):
    return records(read_log(path, "arm", **options), filter_name, "exact_match")


def refused(says, call, *args, **options):
    with pytest.raises(UsageError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    for part in [says] if isinstance(says, str) else says:
        assert part in str(caught.value)


FOUR = [sample(i, score) for i, score in enumerate([1.0, 0.0, 1.0, 1.0])]


def forms(folder):
    """The same four documents as files of several shapes."""
    flexible = [
        row | {"filter": "flexible-extract", "exact_match": 0.0, "filtered_resps": ["[invalid]"]} for row in FOUR
    ]
    yield jsonl(folder / "plain.jsonl", FOUR)
    (folder / "list.json").write_text(json.dumps(FOUR))
    yield folder / "list.json"
    (folder / "pretty.json").write_text(json.dumps(FOUR, indent=2))
    yield folder / "pretty.json"
    yield jsonl(folder / "unnested.jsonl", [row | {"resps": row["resps"][0]} for row in FOUR])
    yield jsonl(
        folder / "bare.jsonl",
        [row | {"resps": row["resps"][0][0], "filtered_resps": row["filtered_resps"][0]} for row in FOUR],
    )
    yield jsonl(folder / "filters.jsonl", [*FOUR, *flexible])
    yield jsonl(folder / "nameless.jsonl", [without(row, "filter") for row in FOUR])
    yield jsonl(folder / "padded.jsonl", [*FOUR, FOUR[0], FOUR[3]])
    yield jsonl(folder / "samples_gsm8k_2026-11-30T08-00-00.5.jsonl", reversed(FOUR))


def test_every_form_gives_the_same_table(tmp_path) -> None:
    reference = jsonl(tmp_path / "reference.jsonl", [row | {"exact_match": 1.0} for row in FOUR])
    tables = []
    for path in forms(tmp_path):
        result, _ = evaluate([reference, path], names=["fp32", "x"], filter_name="strict-match", bins=2)
        tables.append(
            {key: result[key] for key in ("bins", "reference", "variants", "length_unit", "metric", "filter")}
        )
    assert all(table == tables[0] for table in tables[1:])
    assert [(b["lo"], b["hi"], b["n"]) for b in tables[0]["bins"]] == [(10, 20, 2), (30, 40, 2)]
    assert [c["accuracy"] for c in tables[0]["variants"][0]["bins"]] == [0.5, 1.0]
    assert (tables[0]["length_unit"], tables[0]["reference"]["overall"]["not_extracted"]) == ("tokens", 0)


def test_what_lm_eval_writes_is_read(tmp_path, monkeypatch) -> None:
    """Written by lm-eval itself, from the objects that its evaluator hands over."""
    from lm_eval.loggers.evaluation_tracker import EvaluationTracker

    tracker = EvaluationTracker(output_path=str(tmp_path))
    monkeypatch.setattr(tracker, "date_id", "2026-11-30T08-00-00.5", raising=False)
    given = [row | {"arguments": [(f"prompt {i}", {"until": ["Q:"]})]} for i, row in enumerate(FOUR)]
    given[1] |= {"exact_match": np.float64("nan")}
    tracker.save_results_samples("gsm8k", given)
    log = read_log(tmp_path, "arm")
    found, dropped = records(log, "strict-match", "exact_match")
    assert (log.task, len(found), dropped) == ("gsm8k", 4, 0)
    assert [r.score for r in found] == [1.0, pytest.approx(np.nan, nan_ok=True), 1.0, 1.0]


def test_filters_are_counted_and_one_must_be_chosen(tmp_path) -> None:
    *_, filters, nameless, _, _ = forms(tmp_path)
    log = read_log(filters, "arm")
    assert log.filters == {"strict-match": 4, "flexible-extract": 4}
    refused(["--filter", "strict-match (4 rows)", "flexible-extract (4 rows)"], choose_filter, [log], None)
    refused("--filter exact: arm has no such rows", choose_filter, [log], "exact")
    assert choose_filter([log], "flexible-extract") == "flexible-extract"
    assert choose_filter([read_log(nameless, "b")], None) is None
    mixed = jsonl(tmp_path / "mixed.jsonl", [FOUR[0], without(FOUR[1], "filter")])
    refused("mixed.jsonl line 2: has no filter name", read_log, mixed, "arm")


def test_a_document_that_contradicts_itself(tmp_path) -> None:
    other = jsonl(tmp_path / "a.jsonl", [*FOUR, sample(2, text="it is 7 after all")])
    refused(["a.jsonl lines 3 and 5: document 2 is there twice"], read, other)
    nameless = [
        without(row, "filter") for row in (*FOUR, FOUR[2] | {"exact_match": 0.0, "filtered_resps": ["[invalid]"]})
    ]
    refused(["lines 3 and 5", "two filters without names?"], read, jsonl(tmp_path / "b.jsonl", nameless), None)
    assert read(jsonl(tmp_path / "c.jsonl", [*FOUR, FOUR[2]]))[1] == 1


@pytest.mark.parametrize("at", [-2, -40, 1, 30])
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_cut_last_row(tmp_path, kind, at) -> None:
    """Cut near its end or near its start (positive: characters into the last row), in a name, a number or a text."""
    lines = [json.dumps(row, ensure_ascii=False) for row in (*FOUR[:3], sample(3, text="é" * 400))]
    whole = "\n".join(lines) if kind == "jsonl" else "[" + ",\n".join(lines) + "]"
    path = tmp_path / f"cut.{kind}"
    path.write_bytes(whole.encode()[: at if at < 0 else len(whole.partition(lines[3])[0].encode()) + at])
    refused(["cut." + kind + " line 4: cut off", "--allow-cut"], read, path)
    assert [r.doc_id for r in read(path, allow_cut=True)[0]] == ["0", "1", "2"]
    assert read_log(path, "arm", allow_cut=True).cut == 1


def test_cut_inside_a_character(tmp_path) -> None:
    row = json.dumps(sample(1, text="é" * 400), ensure_ascii=False).encode()
    data = json.dumps(FOUR[0]).encode() + b"\n" + row[: row.index("é".encode()) + 41]
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "a.json").write_bytes(b"[" + data.replace(b"\n", b",\n"))
    for name in ("a.jsonl", "a.json"):
        refused(f"{name} line 2: cut off", read, tmp_path / name)
        assert len(read(tmp_path / name, allow_cut=True)[0]) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"doc_id": 0}\n{"doc_id": 1,\n{"doc_id": 2}\n', "line 2: not JSON"),
        ('[{"doc_id": 0},\n{"doc_id": 1 "a"},\n{"doc_id": 2}]', "line 2: not JSON"),
        ("hello\n", "line 1: not JSON"),
        ("3\n", "line 1: not a JSON object"),
        ('{"a": 1}\n', "line 1: neither doc_id nor doc_hash"),
        ("", "no samples in it"),
        ("[]", "no samples in it"),
    ],
)
def test_damaged_files(tmp_path, text, says) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    refused(["a.jsonl", says], read_log, tmp_path / "a.jsonl", "arm", allow_cut=True)


def test_missing_pieces_are_named(tmp_path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [FOUR[0], without(FOUR[1], "exact_match") | {"acc": 1}])
    refused(["a.jsonl line 2: no metric exact_match", "acc", "--metric"], read, path)
    refused("line 1: no resps", read, jsonl(tmp_path / "b.jsonl", [without(FOUR[0], "resps", "tokens")]))
    refused(
        "log-likelihood",
        read,
        jsonl(tmp_path / "c.jsonl", [FOUR[0] | {"resps": [[["-1.5", "False"]], [["-0.2", "True"]]]}]),
    )
    refused(
        "a response is not text but dict", read, jsonl(tmp_path / "d.jsonl", [FOUR[0] | {"resps": [{"content": "x"}]}])
    )
    refused("exact_match: 7 is not a score", read, jsonl(tmp_path / "e.jsonl", [FOUR[0] | {"exact_match": 7}]))
    refused(
        "exact_match: 'good' is not a score", read, jsonl(tmp_path / "f.jsonl", [FOUR[0] | {"exact_match": "good"}])
    )
    refused("2 values of tokens for 1 answers", read, jsonl(tmp_path / "g.jsonl", [FOUR[0] | {"tokens": [1, 2]}]))
    refused("tokens -3 is not a count", read, jsonl(tmp_path / "h.jsonl", [FOUR[0] | {"tokens": -3}]))
    refused("no such file or folder", read_log, tmp_path / "nowhere", "arm")


def test_the_metric_is_exact_match_or_the_only_one_of_0_and_1(tmp_path) -> None:
    def chosen(*rows, wanted=None):
        return choose_metric(read_log(jsonl(tmp_path / "m.jsonl", rows), "arm"), "strict-match", wanted)

    bare = without(FOUR[0], "exact_match")
    assert chosen(FOUR[0] | {"acc": 1}) == "exact_match"
    assert chosen(bare | {"acc": True, "bleu": 31.5}, bare | {"doc_id": 1, "acc": float("nan"), "bleu": 0}) == "acc"
    assert chosen(bare | {"acc": 1, "f1": 0.5}, wanted="f1") == "f1"
    refused(["several metrics", "acc, pass"], chosen, bare | {"acc": 1, "pass": 0})
    refused("no metric of 0 and 1", chosen, bare | {"bleu": 31.5})


@pytest.mark.parametrize(
    ("value", "scores"),
    [
        (1, [1]),
        (True, [1]),
        ("0.5", [0.5]),
        (None, [None]),
        (float("nan"), [None]),
        ([1, 0, None], [1, 0, None]),
        ([], [None]),
    ],
)
def test_scores(tmp_path, value, scores) -> None:
    """null, NaN and nothing are no score, never 0; lm-eval writes a Decimal as text."""
    (record,), _ = read(jsonl(tmp_path / "a.jsonl", [FOUR[0] | {"exact_match": value}]))
    assert [None if s != s else s for s in record.scores] == scores
    known = [s for s in scores if s is not None]
    assert record.score == pytest.approx(sum(known) / len(known) if known else np.nan, nan_ok=True)


@pytest.mark.parametrize(
    ("row", "extracted", "score"),
    [
        ({"filtered_resps": ["42"]}, (True,), 1),
        ({"filtered_resps": ["[invalid]"]}, (False,), 0),
        ({"filtered_resps": "  "}, (False,), 0),
        ({"filtered_resps": [[None]]}, (False,), 0),
        ({"filtered_resps": [[]]}, (False,), 0),
        ({"filtered_resps": ["None"]}, (True,), 1),  # an answer, since it is right
        ({"filtered_resps": ["None"], "exact_match": 0.0}, (False,), 0),
        ({"filtered_resps": ["42"], "extracted": False}, (False,), 0),
        ({"filtered_resps": ["[invalid]"], "extracted": True}, (True,), 1),
        (
            {"filtered_resps": ["42", ""], "exact_match": [1, 1], "resps": [["a", "b"]], "tokens": [1, 2]},
            (True, False),
            0.5,
        ),
        ({"filtered_resps": ["42", ""], "exact_match": 1, "resps": [["a", "b"]], "tokens": [1, 2]}, (True, False), 1),
    ],
)
def test_what_was_not_extracted_is_not_correct(tmp_path, row, extracted, score) -> None:
    (record,), _ = read(jsonl(tmp_path / "a.jsonl", [FOUR[0] | row]))
    assert record.extracted == extracted
    assert record.score == score
    assert record.overruled == (1 if False in extracted and score < np.mean((FOUR[0] | row)["exact_match"]) else 0)


def test_thinking_that_never_ended(tmp_path) -> None:
    """E1: cut while thinking: truncated and without an answer, and still in the bin of its length."""
    rows = [
        *FOUR[:3],
        FOUR[3]
        | {"resps": [[""]], "filtered_resps": ["[invalid]"], "exact_match": 0.0, "stop": "length", "tokens": 4096},
    ]
    rows[0] = rows[0] | {"stop": "eos"}
    result, _ = evaluate([jsonl(tmp_path / "a.jsonl", FOUR), jsonl(tmp_path / "b.jsonl", rows)], bins=2)
    cell = result["variants"][0]["bins"][1]
    assert (cell["n"], cell["truncated"], cell["not_extracted"], cell["losses"]) == (2, 1, 1, 1)
    assert result["variants"][0]["bins"][1]["length_ratio"] == pytest.approx((1 + 4096 / 40) / 2)
    assert result["reference"]["bins"][1]["truncated"] is None  # not recorded there


def test_repeats_are_one_question(tmp_path) -> None:
    rows = [
        sample(i, float(i + r > 0), text=f"try {r}", repeat=r, tokens=10 * r + 1) for r in range(3) for i in range(4)
    ]
    found, dropped = read(jsonl(tmp_path / "a.jsonl", [*rows, rows[0]]))
    assert dropped == 1
    assert [(r.doc_id, len(r.scores), r.texts[2]) for r in found] == [(str(i), 3, "try 2") for i in range(4)]
    assert found[0].score == pytest.approx(2 / 3)
    _, length, _ = lengths([(r,) for r in found], ["a"], None, None)
    assert length.tolist() == [[11.0] * 4]
    nested = [FOUR[0] | {"resps": [["a", "bb", "ccc"]], "exact_match": [1, 0, 1], "tokens": [5, 1, 9]}]
    (record,), _ = read(jsonl(tmp_path / "b.jsonl", nested))
    assert (record.texts, record.tokens, record.score) == (("a", "bb", "ccc"), (5, 1, 9), pytest.approx(2 / 3))
    result, _ = evaluate(
        [jsonl(tmp_path / "c.jsonl", rows), jsonl(tmp_path / "d.jsonl", [r | {"tokens": 1} for r in rows])]
    )
    assert result["reference"]["overall"]["answers"] == 12
    assert "bootstrap over questions" in result["methods"]["difference"]


def test_half_a_surrogate_pair(tmp_path) -> None:
    """As an escape, as raw bytes, and a whole pair, which is one character."""
    path = tmp_path / "a.jsonl"
    lines = [
        json.dumps(sample(0, text="x \ud835 y")),
        json.dumps(sample(1, text="\U0001d400")),
        json.dumps(sample(2, text="z") | {"doc_id": "\ud835"}),
    ]
    raw = json.dumps(sample(3, text="x \ud835 y"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    path.write_bytes("\n".join(lines).encode() + b"\n" + raw)
    found, _ = read(path)
    assert [r.texts[0] for r in found] == ["x \ufffd y", "\U0001d400", "z", "x \ufffd y"]
    assert found[2].doc_id == "\ufffd"


def test_line_separators_inside_texts(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(sample(i, text="a\u2028b\x85c"), ensure_ascii=False) for i in range(2)))
    assert [r.texts[0] for r in read(path)[0]] == ["a\u2028b\x85c"] * 2


def test_folders(tmp_path) -> None:
    """The newest of several runs; several tasks or models must be chosen from; a pattern pools tasks."""
    run = tmp_path / "run" / "model"
    jsonl(run / "samples_math_a_2026-11-30T08-00-00.5.jsonl", FOUR[:1])
    newest = jsonl(run / "samples_math_a_2026-11-30T09-00-00.5.jsonl", FOUR[:2])
    jsonl(run / "samples_math_b_2026-11-30T08-00-00.5.jsonl", FOUR[:3])
    refused(["several tasks", "math_a, math_b", "--task"], read_log, tmp_path / "run", "arm")
    refused(["no task gsm8k", "math_a, math_b"], read_log, tmp_path / "run", "arm", task="gsm8k")
    log = read_log(tmp_path / "run", "arm", task="math_a")
    assert (log.task, len(log.rows), list(log.files)) == ("math_a", 2, [newest])
    assert "the newest of 2 files" in log.notes[0]
    pooled, _ = read(tmp_path / "run", task="math_*")
    assert [r.label for r in pooled] == ["math_a/0", "math_a/1", "math_b/0", "math_b/1", "math_b/2"]
    jsonl(tmp_path / "run" / "other" / "samples_math_b_2026-11-30T08-00-00.5.jsonl", FOUR)
    refused(["samples of math_b from several runs", "other"], read_log, tmp_path / "run", "arm", task="math_b")
    (run / "empty").mkdir()
    refused("no samples_*.jsonl in it", read_log, run / "empty", "arm")


def paired(tmp_path, left, right):
    return pair([read(jsonl(tmp_path / f"{name}.jsonl", rows))[0] for name, rows in (("left", left), ("right", right))])


def test_pairing_goes_by_content_not_by_number(tmp_path) -> None:
    moved = [row | {"doc_id": 10 + row["doc_id"]} for row in FOUR]
    found = paired(tmp_path, FOUR, reversed(moved))
    assert found.how == "doc_hash + prompt_hash"
    assert [(a.doc_id, b.doc_id) for a, b in found.questions] == [("0", "10"), ("1", "11"), ("2", "12"), ("3", "13")]
    twice = [*FOUR, FOUR[0] | {"doc_id": 4, "exact_match": 0.0}]  # data sets do hold a document twice
    assert [
        (a.doc_id, b.score) for a, b in paired(tmp_path, twice, twice).questions if a.doc_hash == FOUR[0]["doc_hash"]
    ] == [
        ("0", 1.0),
        ("4", 0.0),
    ]


def test_unpaired_and_unscored_questions_are_listed(tmp_path) -> None:
    right = [*FOUR[1:3], FOUR[3] | {"exact_match": float("nan")}, sample(9)]
    found = paired(tmp_path, FOUR, right)
    assert [a.doc_id for a, _ in found.questions] == ["1", "2"]
    assert (found.unpaired, found.unscored) == ([["0"], ["9"]], [[], ["3"]])
    result, _ = evaluate([tmp_path / "left.jsonl", tmp_path / "right.jsonl"])
    assert "right: 1 questions have no score and are left out: 3." in result["notes"]
    assert "left: 1 questions are not in all arms and left out: 0." in result["notes"]
    assert result["reference"]["overall"]["accuracy"] == 0.5
    refused(["no document is in all arms", "left.jsonl: 4"], paired, tmp_path, FOUR, [sample(9)])
    refused("no document has a score in all arms", paired, tmp_path, FOUR, [FOUR[0] | {"exact_match": None}])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt_hash": sha("another prompt")}, "has another prompt"),
        ({"doc_hash": sha("shuffled choices"), "prompt_hash": sha("shuffled choices")}, "is another document"),
        ({"target_hash": sha("another target")}, "has another target"),
    ],
)
def test_other_questions_stop_the_comparison(tmp_path, change, says) -> None:
    changed = [*FOUR[:2], FOUR[2] | change, FOUR[3] | change]
    refused(["document 2 ", "right.jsonl line 3", says, "left.jsonl line 3"], paired, tmp_path, FOUR, changed)


def test_logs_without_hashes_are_paired_on_doc_id(tmp_path) -> None:
    bare = [without(row, "doc_hash", "prompt_hash") for row in FOUR]
    assert paired(tmp_path, FOUR, bare).how == "task + doc_id"
    result, _ = evaluate([tmp_path / "left.jsonl", tmp_path / "right.jsonl"])
    assert any("Paired on task + doc_id alone" in note for note in result["notes"])
    assert paired(tmp_path, FOUR, [without(row, "prompt_hash") for row in FOUR]).how == "doc_hash"
    half = [bare[0], without(FOUR[1], "doc_id")]
    refused(["right.jsonl line 2: no doc_id", "nothing to pair on"], paired, tmp_path, FOUR, half)


def test_length_units(tmp_path) -> None:
    """Recorded tokens, else a tokenizer's, else characters; never two measures in one arm."""
    left, right = FOUR, [without(row, "tokens") | {"resps": [["four"]]} for row in FOUR]
    arms, names = paired(tmp_path, left, right).questions, ["a", "b"]
    unit, length, warnings = lengths(arms, names, None, None)
    assert (unit, length[0].tolist(), np.isnan(length[1]).all()) == ("tokens", [10, 20, 30, 40], True)
    assert "b records no token counts; its lengths are not known" in warnings[0]
    unit, length, warnings = lengths(arms, names, lambda text: len(text) // 2, "some/tokenizer")
    assert (unit, length[1].tolist()) == ("tokens", [2] * 4)
    assert "b records no token counts; its lengths are counted by some/tokenizer" in warnings[0]
    flipped = [(b, a) for a, b in arms]
    unit, length, _ = lengths(flipped, names, lambda text: len(text) // 2, "some/tokenizer")
    assert (unit, length.tolist()) == ("tokens of some/tokenizer", [[2] * 4, [9] * 4])  # "so the answer is 0"
    unit, length, (warning,) = lengths(flipped, names, None, None)
    assert (unit, length.tolist(), "strips the thinking part" in warning) == ("characters", [[4] * 4, [18] * 4], True)
    one_missing = [row | {"tokens": None if i == 1 else 5} for i, row in enumerate(FOUR)]
    _, length, _ = lengths(paired(tmp_path, one_missing, FOUR).questions, names, None, None)
    assert np.isnan(length[0]).tolist() == [False, True, False, False]


def test_a_tokenizer_counts_tokens(tmp_path) -> None:
    rows = [without(row, "tokens") | {"resps": [["Call me Ishmael. " * (i + 1)]]} for i, row in enumerate(FOUR)]
    paths = [jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", rows)]
    result, _ = evaluate(paths, tokenizer=location_of("tiny-mamba2"), bins=4)
    assert result["length_unit"] == "tokens of tiny-mamba2"
    assert 3 < result["bins"][0]["median_length"] < 17 < result["bins"][3]["median_length"]  # fewer than characters
    refused("--tokenizer", evaluate, paths, tokenizer=str(tmp_path))


UNIT = "and so it goes on, 21"


@pytest.mark.parametrize(
    ("text", "looped"),
    [
        ("Well. " + UNIT * 5, True),
        ("Well. " + UNIT * 5 + UNIT[:9] + "\n\n", True),
        ("Well. " + UNIT * 4 + UNIT[:20], False),
        (UNIT * 9 + " The answer is 4.", False),
        ("ha" * 50, True),
        ("ha" * 49, False),
        ("4" + "\n" * 100, True),
        ("".join(f"Step {i}: add one. " for i in range(90)), False),
        ("", False),
    ],
)
def test_loops(text, looped) -> None:
    assert loops(text) is looped


def test_a_recorded_loop_beats_the_detector(tmp_path) -> None:
    rows = [sample(0, text="ha" * 99), sample(1, text="ha" * 99, looped=False), sample(2, looped=True), sample(3)]
    assert [r.looped for r in read(jsonl(tmp_path / "a.jsonl", rows))[0]] == [(True,), (False,), (True,), (False,)]
