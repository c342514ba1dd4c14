"""The generated task: its documents, its parts, its grading."""

import random
from pathlib import Path

import pytest
from replayssm_emulation import UsageError
from replayssm_tasks import progression

import replayssm_eval


def test_progression_by_hand() -> None:
    assert progression.answer([4, 0, 7], 2) == "0.0.2a6b2c9;0.0.1a5b1c8!"
    assert progression.answer([1], 10)[:18] == "0.1.0a1;0.0.9a0;0."


def test_progression_documents() -> None:
    many = progression.documents(400, seed=3)
    assert many[:7] == progression.documents(7, seed=3)
    assert many[0] != progression.documents(1, seed=4)[0]
    assert all(d["length"] == len(d["answer"]) == 30 * d["laps"] for d in many)
    lengths = sorted(d["length"] for d in many)
    assert lengths[0] < 40
    assert lengths[-1] > 3500
    assert 270 < lengths[200] < 440  # log-uniform on 30..4000 has its median at 346
    before = random.getstate()
    progression.documents(3)
    assert random.getstate() == before
    assert progression.documents(1)[0]["prompt"] == "a4b2c2d4e9f6g7h9i1j2k0l0:0.1.6="  # for all time
    for bad in ({"letters": 0}, {"lengths": (5, 2)}, {"lengths": (1, 2, 3)}):
        with pytest.raises(UsageError, match="replayssm_progression"):
            progression.documents(1, **bad)


def test_progression_parts_are_disjoint() -> None:
    tests = progression.documents(300, seed=0, lengths=(1, 10), letters=2)
    train = set(progression.training_text(2000, seed=0, lengths=(1, 10), letters=2))
    tables = {d["prompt"].split(":")[0] for d in tests}
    assert tables.isdisjoint(text.split(":")[0] for text in train)
    assert (
        len(tables | {text.split(":")[0] for text in train}) == 100
    )  # every table of two steps is in one of the parts
    assert all(progression.part([int(s) for s in table[1::2]]) == "test" for table in tables)
    text = next(iter(progression.training_text(1)))
    prompt, _, run = text.partition("=")
    steps = [int(s) for s in prompt.split(":")[0][1::2]]
    assert run == progression.answer(steps, int(prompt.split(":")[1].replace(".", "")))


def test_progression_has_a_token_a_character() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(
        str(Path(replayssm_eval.__file__).parent / "assets" / "tiny-mamba2" / "tokenizer.json")
    )
    for document in progression.documents(5, letters=26):
        text = document["prompt"] + document["answer"]
        assert tokenizer.encode(text).tokens == list(text)


@pytest.mark.parametrize(
    ("response", "right", "extracted", "error"),
    [
        ("0.0.2a6b2c9;0.0.1a5b1c8!", 1, 1, None),
        ("0.0.2a6b2c9;0.0.1a5b1c8! and so on: 0.0.1", 1, 1, None),
        (" 0.0.2 a6 b2 c9;\n0.0.1 a5 b1 c8 !", 1, 1, None),
        ("Sure! 0.0.2a6b2c9;0.0.1a5b1c8!", 1, 1, 0),
        ("0.0.2a6b2c9;0.0.1a5b1c8", 0, 0, 23),
        ("0.0.2a6b3c9;0.0.1a5b1c8!", 0, 1, 8),
        ("0.0.1a5b1c8!", 0, 1, 4),
        ("0.0.2a6b2c9!", 0, 1, 11),
        ("", 0, 0, 0),
    ],
)
def test_progression_grading(response, right, extracted, error) -> None:
    document = {"answer": progression.answer([4, 0, 7], 2)}
    assert progression.grade(document, response) == {"exact_match": right, "extracted": extracted}
    assert progression.first_error(document["answer"], response) == error
