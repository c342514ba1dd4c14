"""A generated task with answers of any length, whose every symbol depends on numbers that stand only in the prompt.

Every letter has a step. A count runs down, lap after lap, and in each lap every letter is followed by its step plus the
count, modulo 10. With three letters, steps 4, 0 and 7, and two laps:

    prompt   a4b0c7:0.0.2=
    answer   0.0.2a6b2c9;0.0.1a5b1c8!

    document  = steps ":" count "=" lap { ";" lap } "!"
    steps     = { letter digit }                  one step a letter, in order
    count     = digit "." digit "." digit         laps that are left, this one included; counts down to 0.0.1
    lap       = count { letter digit }            each letter's step plus the count, modulo 10

What a testbed needs, and how this has it:

- *Easy at every step.* The next symbol is the next letter, a sum of two digits, or a count less one. Every document
  ends in the lap of count 1, and one in twelve has no other. There a model first learns to recall a step,
  then to add. (A sum that runs on from letter to letter teaches nothing before both operands are known.
  A model trained on such sums did not get past guessing.)
- *A long-lived state.* The steps are told once, and a symbol 4,000 tokens later still needs the right one. (The laps
  before it have the same sums with other counts, so memory is refreshable in principle. Attention over the prompt also
  does without the state. A testbed for this task should have no attention layer, or have it first, where it cannot yet
  bind a letter to its step.)
- *One lapse of memory is one wrong answer*: an answer is right only as a whole.
- *Known lengths.* Letters, digits and marks alternate, so a byte-level BPE tokenizer (which never merges across these
  classes) makes one token of every character: the length in characters is the length in tokens, 6 + 2 x letters a lap.
- *No leakage.* A table of steps belongs to the test part if its SHA-256 begins with a byte divisible by 8, else to the
  training part. No training text of any seed shares its steps with a test document of any seed.

It is meant for models trained on `training_text`, such as tiny-answers (12 letters, answers of up to 4,000
characters). It explains nothing to a chat model. `letters` sets how much has to be remembered. Document i of a
seed depends on nothing but the seed, i and the settings, so a limit takes a prefix.
"""

import hashlib
import math
import random
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

from replayssm_emulation.errors import UsageError

LETTERS = 12
LENGTHS = (30, 4000)  # characters of the answer: shortest, longest
_MOST_LAPS = 999


def answer(steps: Sequence[int], laps: int) -> str:
    """The run of `laps` laps: every letter with its step plus the laps that are left, modulo 10."""
    return ";".join(_lap(steps, left) for left in range(laps, 0, -1)) + "!"


def _lap(steps: Sequence[int], left: int) -> str:
    symbols = (f"{letter}{(step + left) % 10}" for letter, step in zip(string.ascii_lowercase, steps, strict=False))
    return ".".join(f"{left:03}") + "".join(symbols)


def documents(
    n: int, seed: int = 0, lengths: Sequence[int] = LENGTHS, letters: int = LETTERS, split: str = "test"
) -> list[dict[str, Any]]:
    """n documents with log-uniform answer lengths: {"prompt", "answer", "laps", "length"}."""
    return list(islice(_stream(seed, lengths, letters, split), n))


def training_text(n: int, seed: int = 0, lengths: Sequence[int] = LENGTHS, letters: int = LETTERS) -> Iterator[str]:
    """n training texts of the same distribution, prompt and answer in one.

    End each text with the end-of-text token of the tokenizer.
    """
    return (d["prompt"] + d["answer"] for d in islice(_stream(seed, lengths, letters, "train"), n))


def _stream(seed: int, lengths: Sequence[int], letters: int, split: str) -> Iterator[dict[str, Any]]:
    if not 1 <= letters <= 26:
        raise UsageError(f"replayssm_progression: letters must be 1 to 26, not {letters}")
    lap = 6 + 2 * letters
    if len(lengths) != 2 or not 1 <= lengths[0] <= lengths[1]:
        raise UsageError(
            f"replayssm_progression: lengths must be two rising numbers of characters, not {list(lengths)}"
        )
    low, high = (math.log(max(1, length / lap)) for length in lengths)
    return (_document(random.Random(f"{split} {seed} {index}"), low, high, letters, split) for index in count())


def _document(rng: random.Random, low: float, high: float, letters: int, split: str) -> dict[str, Any]:
    laps = min(_MOST_LAPS, round(math.exp(low + (high - low) * rng.random())))
    while True:
        steps = [int(10 * rng.random()) for _ in range(letters)]
        if part(steps) == split:
            break
    text = answer(steps, laps)
    table = "".join(f"{letter}{step}" for letter, step in zip(string.ascii_lowercase, steps, strict=False))
    return {"prompt": f"{table}:{'.'.join(f'{laps:03}')}=", "answer": text, "laps": laps, "length": len(text)}


def part(steps: Sequence[int]) -> str:
    """Which part a table of steps belongs to: "test" or "train"."""
    digest = hashlib.sha256("".join(map(str, steps)).encode()).digest()
    return "test" if digest[0] % 8 == 0 else "train"


def extract_run(response: str) -> str | None:
    """The run in a response, from its first count to the first "!", spaces aside; None if it does not end."""
    text = re.sub(r"\s", "", response)
    first = re.search(r"\d\.\d\.\d", text)
    end = text.find("!", first.end()) if first else -1
    return text[first.start() : end + 1] if first and end >= 0 else None


def first_error(reference: str, response: str) -> int | None:
    """Index of the first character that differs from the reference or is missing. None if the run is right."""
    run = re.sub(r"\s", "", response)
    return next((i for i, c in enumerate(reference) if run[i : i + 1] != c), None)


def grade(document: Mapping[str, Any], response: str) -> dict[str, int]:
    """{"exact_match", "extracted"} of a raw response: right only if the whole run is."""
    run = extract_run(response)
    return {"exact_match": int(run == document["answer"]), "extracted": int(run is not None)}


def dataset(
    progression_documents: int = 512,
    progression_seed: int = 0,
    progression_lengths: Sequence[int] = LENGTHS,
    progression_letters: int = LETTERS,
    **others: Any,
) -> dict[str, Any]:
    """The test split for lm-eval, which passes a task's metadata (and the model's arguments) as keywords."""
    import datasets

    rows = documents(progression_documents, progression_seed, progression_lengths, progression_letters)
    return {"test": datasets.Dataset.from_list(rows)}
