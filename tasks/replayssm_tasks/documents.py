"""From rows of a data set, as the hub or a local file has them, to the few fields that prompts and grading need.

The functions named like tasks are lm-eval `process_docs`. lm-eval calls them several times a run and pairs the results
by position, so they must be pure: no random choice, no state.
"""

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from replayssm_emulation.errors import UsageError

from .extract import LETTERS, last_box
from .math_answers import exact_number, plain

KINDS_OF_FILE = (".jsonl", ".json", ".parquet", ".csv")
Row = Mapping[str, Any]


def gsm8k(dataset: Iterable[Row]) -> Any:
    """{"question", "answer"}: the answer is the number after ####."""
    return _dataset("replayssm_gsm8k", dataset)


def math_level5(dataset: Iterable[Row]) -> Any:
    r"""{"problem", "answer", "type"} of Level 5: the answer is what the solution boxes last."""
    return _dataset("replayssm_math_level5", dataset)


def gpqa_diamond(dataset: Iterable[Row]) -> Any:
    """{"question", "choices", "answer", "subject"}: four choices. Only their text and the question decide the order."""
    return _dataset("replayssm_gpqa_diamond", dataset)


def mmlu_pro(dataset: Iterable[Row]) -> Any:
    """{"question", "choices", "answer", "subject"}: up to ten choices in the data set's own order."""
    return _dataset("replayssm_mmlu_pro", dataset)


def local(local_path: str, local_task: str, **others: Any) -> dict[str, Any]:
    """A lm-eval `custom_dataset`: the documents of a local file. lm-eval passes metadata and model arguments too."""
    import datasets

    return {"test": datasets.Dataset.from_list(documents(local_task, read_rows(local_path), local_path))}


def _dataset(task: str, dataset: Iterable[Row]) -> Any:
    import datasets

    return datasets.Dataset.from_list(documents(task, dataset, "the data set"))


def documents(task: str, rows: Iterable[Row], source: str) -> list[dict[str, Any]]:
    """The documents of a task's rows. UsageError names source, row and field of what is missing or cannot be graded."""
    out = []
    for index, row in enumerate(rows):
        try:
            document = _FROM_ROW[task](row)
        except KeyError as error:
            raise UsageError(
                f"{task}: {source} row {index}: no field {error.args[0]!r}; found {', '.join(map(str, row))}"
            ) from None
        except _BadRowError as error:
            raise UsageError(f"{task}: {source} row {index}: {error}") from None
        if document is not None:
            out.append(document)
    if not out:
        raise UsageError(f"{task}: {source} has no {'row of Level 5' if task == 'replayssm_math_level5' else 'row'}")
    return out


class _BadRowError(Exception):
    pass


def _text(row: Row, field: str) -> str:
    value = row[field]
    if not isinstance(value, str) or not value.strip():
        raise _BadRowError(f"{field} is not text but {value!r:.40}")
    return value.strip()


def _from_gsm8k(row: Row) -> dict[str, Any]:
    number = exact_number(_text(row, "answer").split("####")[-1])
    if number is None:
        raise _BadRowError("no number after #### in the answer")
    return {"question": _text(row, "question"), "answer": plain(number)}


def is_level5(row: Row) -> bool:
    """`Level 5`, 5 or "5"; True too where rows carry no level, since such data was filtered before."""
    return "level" not in row or str(row["level"]).lower().removeprefix("level").strip() == "5"


def _from_math(row: Row) -> dict[str, Any] | None:
    if not is_level5(row):
        return None
    answer = _text(row, "answer") if "answer" in row and "solution" not in row else last_box(_text(row, "solution"))
    if not answer:
        raise _BadRowError(r"no \boxed{...} in the solution")
    return {"problem": _text(row, "problem"), "answer": answer, "type": str(row.get("type", row.get("subject", "")))}


def choice_order(question: str, choices: Sequence[str]) -> list[int]:
    """Indices of the choices, sorted by the SHA-256 of question and choice.

    The order is the same in every process and for every order of the input.
    """
    return sorted(range(len(choices)), key=lambda i: hashlib.sha256(f"{question}\0{choices[i]}".encode()).digest())


def _from_gpqa(row: Row) -> dict[str, Any]:
    question = _text(row, "Question")
    choices = [
        _text(row, field)
        for field in ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    ]
    order = choice_order(question, choices)
    return {
        "question": question,
        "choices": [choices[i] for i in order],
        "answer": LETTERS[order.index(0)],
        "subject": str(row.get("High-level domain") or ""),
    }


def _from_mmlu_pro(row: Row) -> dict[str, Any]:
    options = row["options"]
    if isinstance(options, str):  # a CSV file
        try:
            options = json.loads(options)
        except ValueError:
            raise _BadRowError("options is text, but not a JSON list") from None
    choices = [str(choice).strip() for choice in options]
    answer = _text(row, "answer").upper()
    if not 2 <= len(choices) <= len(LETTERS) or answer not in LETTERS[: len(choices)] or len(answer) != 1:
        raise _BadRowError(f"answer {answer!r:.20} is not the letter of one of {len(choices)} options")
    return {
        "question": _text(row, "question"),
        "choices": choices,
        "answer": answer,
        "subject": str(row.get("category") or ""),
    }


_FROM_ROW: dict[str, Callable[[Row], dict[str, Any] | None]] = {
    "replayssm_gsm8k": _from_gsm8k,
    "replayssm_math_level5": _from_math,
    "replayssm_gpqa_diamond": _from_gpqa,
    "replayssm_mmlu_pro": _from_mmlu_pro,
}


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl, .json (a list), .parquet or .csv file. Reads without a cache, a network or guessed types."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(path).to_pylist()
        elif path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = list(csv.DictReader(file))
        elif path.suffix == ".json":
            rows = json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".jsonl":
            rows = [
                _json_line(path, number, line)
                for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
                if line.strip()
            ]
        else:
            raise UsageError(f"{path}: unknown kind of file; use {', '.join(KINDS_OF_FILE)}")
    except UsageError:
        raise
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's and json's errors are among them
        raise UsageError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path}: not a list of rows")
    return rows


def _json_line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UsageError(f"{path} line {number}: not JSON ({error})") from None
