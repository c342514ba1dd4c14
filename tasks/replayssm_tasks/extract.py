r"""From the response of a model to its answer.

The answer is in the text after thinking: in the last \boxed{...}, else behind a phrase, else in the last line.

A response whose thinking never ended has no answer, and neither has one that stops inside its last box: those were cut,
and an earlier number in them is not what the model settled on. `extract(kind, response, document)` returns the answer
or None, which the tasks write as "[invalid]" and count as *not extracted* rather than *wrong*.

    kind        answer
    number      one number, canonically spelled: 9500, 0.5, 1/3 (units, currency, separators gone)
    expression  what is in the box, as written
    letter      the letter of a choice, A to J
    run         the run of the generated task, to its "!"
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from typing import Any

from .math_answers import clean, equal, evaluate, exact_number, plain
from .progression import extract_run

INVALID = "[invalid]"
THINK, END_THINK = "<think>", "</think>"
LETTERS = "ABCDEFGHIJ"
_LONGEST = 1000  # characters of a line or box that are searched for an answer
_MOST_PHRASES = 20


def answer_text(response: str) -> str | None:
    """What follows the last end-of-thinking mark; None when thinking began (again) and did not end."""
    text = response.rpartition(END_THINK)[2]
    return None if THINK in text else text


def reopen_thinking(prompt: str, response: str) -> str:
    """The response with the mark that its prompt ended in, when a chat template has opened the thinking part there.

    Without it a response cut while thinking looks like one that never thought.
    """
    return THINK + response if THINK in prompt.rpartition(END_THINK)[2] else response


_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_UNBRACED = re.compile(r"[^\s${}\\]*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_box(text: str) -> str | None:
    r"""Contents of the last non-empty \boxed{...} or \fbox{...}. None without one; "" if the text ends inside it."""
    for found in reversed(list(_BOX.finditer(text))):
        if text[found.end() : found.end() + 1] == "{":
            end = _closing_brace(text, found.end())
            if end is None:
                return ""
            inside = text[found.end() + 1 : end].strip()
        else:
            inside = _UNBRACED.match(text, found.end())[0].rstrip(".,;")  # type: ignore[index]
        if inside:
            return inside
    return None


def _closing_brace(text: str, start: int) -> int | None:
    r"""Index of the brace that closes the one at `start`; \{ and \} do not count."""
    depth = 0
    for found in _BRACE.finditer(text, start):
        depth += (found[0] == "{") - (found[0] == "}")
        if depth == 0 and found[0] == "}":
            return found.start()
    return None


def extract(kind: str, response: str, document: Mapping[str, Any]) -> str | None:
    """The answer of `kind` in a response to `document`, or None."""
    text = answer_text(response)
    return None if text is None else _KINDS[kind](text, document)


def _number(text: str, document: Mapping[str, Any]) -> str | None:
    box = last_box(text)
    if box is not None:
        value = _number_in(box, 0)
    else:
        value = next((v for phrase in _phrases(text) if (v := _number_in(phrase, 0)) is not None), None)
        value = _number_in(_last_line(text), -1) if value is None else value
    return None if value is None else plain(value)


# A sign belongs to a number unless a number or bracket stands before it.
_NUMBER = re.compile(r"(?:(?<![\d.)])-)?(?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)(?:\.\d+)?(?:/[1-9]\d*)?")


def _number_in(text: str, which: int) -> Fraction | None:
    """The number that `text` is, or its first (0) or last (-1) one."""
    if len(text) > _LONGEST:
        return None
    value = exact_number(text)
    if value is not None:
        return value
    text = clean(text).split("=")[-1]
    found = _NUMBER.findall(text)
    return _fraction(found[which]) if found else None


def _fraction(text: str) -> Fraction:
    top, _, bottom = text.replace(",", "").partition("/")
    return Fraction(top) / Fraction(bottom or 1)


_FORMULA = re.compile(r"(?P<mark>\$\$?)(?P<dollars>.+?)(?P=mark)|\\\((?P<round>.+?)\\\)|\\\[(?P<square>.+?)\\\]")


def _expression(text: str, document: Mapping[str, Any]) -> str | None:
    box = last_box(text)
    if box is not None:
        return " ".join(box.split()) or None
    text = text.strip()
    for candidate in (*_phrases(text), text if "\n" not in text and len(text) <= _LONGEST else ""):
        formula = _FORMULA.match(candidate)
        if formula:
            return (formula["dollars"] or formula["round"] or formula["square"]).strip()
        bare = clean(candidate.split(". ")[0])
        if re.search(r"[\d\\]", bare) and (evaluate(bare, 0) is not None or exact_number(bare) is not None):
            return bare
    return None


def _letter(text: str, document: Mapping[str, Any]) -> str | None:
    choices: Sequence[str] = document["choices"]
    box = last_box(text)
    if box == "":
        return None
    for candidate, whole in ((box or "", True), *((p, False) for p in _phrases(text)), (_last_line(text), True)):
        letter = _letter_in(candidate, choices, whole)
        if letter is not None:
            return letter
    return None


# Emphasis, brackets, \text{ and small words may stand before a letter.
_BEFORE = r"(?:[\s*_$({\[:\"']|\\(?:text[a-z]*|math[a-z]+)\s*\{|(?i:the|option|choice|answer|letter|is)\s)*"
_LETTER = re.compile(rf"{_BEFORE}([A-J])(?![A-Za-z'’])(.*)", re.DOTALL)
_LOWER = re.compile(rf"{_BEFORE}([a-j])\W*")
_MORE_LETTERS = re.compile(r"[\s*_)}\].]*(?:,|/|&|and\b|or\b)\W*[A-J](?![A-Za-z])")
_PROSE = re.compile(r" (?!(?:because|since|as|which|with|for|from|by)\b)[a-z]")


def _letter_in(text: str, choices: Sequence[str], whole: bool) -> str | None:
    """The letter that `text` begins with, or the letter of the choice that it spells out.

    whole: nothing but the choice may follow the letter.
    """
    text = text.strip().strip("*_ ")
    if not 0 < len(text) <= _LONGEST:
        return None
    found = _LOWER.fullmatch(text) or _LETTER.match(text)
    letter, rest = (found[1].upper(), found[2] if found.re is _LETTER else "") if found else ("", "")
    if not letter or re.search(r"\w", rest):
        named = _only(choices, lambda choice: _squeeze(choice) == _squeeze(text))
        if named or not letter:
            return named or (_only(choices, lambda choice: equal(text, choice)) if whole else None)
    if LETTERS.index(letter) >= len(choices) or _MORE_LETTERS.match(rest):
        return None
    if letter in "AI" and _PROSE.match(rest):  # an article or a pronoun
        return None
    after = _squeeze(rest.lstrip(" \t*_)}]$.:,-–—\"'"))
    return letter if not whole or after in ("", _squeeze(choices[LETTERS.index(letter)])) else None


def _only(choices: Sequence[str], fits: Callable[[str], bool]) -> str | None:
    """The letter of the one choice that fits."""
    letters = [letter for letter, choice in zip(LETTERS, choices, strict=False) if fits(choice)]
    return letters[0] if len(letters) == 1 else None


def _squeeze(text: str) -> str:
    """A quoted choice without LaTeX's text commands and marks."""
    return re.sub(r"\\(?:text|math)[a-z]*(?=\s*\{)|[\s$*{}.]", "", text).casefold()


_KINDS: dict[str, Callable[[str, Mapping[str, Any]], str | None]] = {
    "number": _number,
    "expression": _expression,
    "letter": _letter,
    "run": lambda text, document: extract_run(text),
}

_PHRASE = re.compile(
    r"(?i:\b(?:answers?|option|choice)\b[*_\s]*(?:is|are|would\s+be|must\s+be|should\s+be|:|=)|####)[\s:*_]*"
)


def _phrases(text: str) -> Iterator[str]:
    """What follows `answer is`, `Answer:`, `####` and their like up to the end of that line, the last one first."""
    for found in islice(reversed(list(_PHRASE.finditer(text))), _MOST_PHRASES):
        end = text.find("\n", found.end())
        line = text[found.end() : end if end >= 0 else len(text)].strip()
        if line:
            yield line[:_LONGEST]


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2].strip()[-_LONGEST:]
