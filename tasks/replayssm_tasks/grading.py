"""What the task files name: lm-eval's filter that extracts an answer, and `process_results` for every kind of answer.

A response has two metrics. `extracted` is 0 when no answer was found in it.
`exact_match` is 1 when the answer is right.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lm_eval.api.filter import Filter
from lm_eval.api.registry import register_filter

from . import progression
from .extract import INVALID, extract
from .math_answers import equal

Document = Mapping[str, Any]


@register_filter("replayssm_final_answer")
class FinalAnswer(Filter):
    """Replaces every response by its answer of `kind` (see `extract`), or by "[invalid]"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def apply(self, resps: Iterable[Sequence[str]], docs: Sequence[Document]) -> list[list[str]]:
        return [
            [filtered(self.kind, response, doc) for response in of_doc] for of_doc, doc in zip(resps, docs, strict=True)
        ]


def filtered(kind: str, response: str, document: Document) -> str:
    """The answer or "[invalid]"; half surrogates become `?`, since no log file could hold them."""
    answer = extract(kind, response, document)
    return INVALID if answer is None else answer.encode("utf-8", "replace").decode()


def number(document: Document, results: Sequence[str]) -> dict[str, int]:
    """Equal as numbers; both sides have one spelling a number."""
    return _metrics(results[0], results[0] == document["answer"])


def expression(document: Document, results: Sequence[str]) -> dict[str, int]:
    """Equal as `math_answers` has it."""
    return _metrics(results[0], results[0] != INVALID and equal(results[0], document["answer"]))


def letter(document: Document, results: Sequence[str]) -> dict[str, int]:
    """The right letter."""
    return _metrics(results[0], results[0] == document["answer"])


def run(document: Document, results: Sequence[str]) -> dict[str, int]:
    """The whole run, to the last character."""
    return progression.grade(document, results[0])


def _metrics(answer: str, right: bool) -> dict[str, int]:
    return {"exact_match": int(right), "extracted": int(answer != INVALID)}
