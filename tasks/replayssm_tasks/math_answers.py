r"""Whether two mathematical answers are the same, decided without a computer-algebra system.

lm-eval brings neither sympy nor math-verify (its `math` extra does, with a pinned antlr), so the comparison is written
out here. Two answers are the same when, after layout, fonts and units are removed,

1. their text is the same; or
2. both are numbers and equal as fractions, exactly: \frac{1}{2} = 1/2 = 0.5, but 0.333 is not 1/3; or
3. both are expressions and agree to nine digits at three places, where variables get fixed values:
   \frac{\sqrt{12}}{2} = \sqrt{3}; or
4. both are lists, sets, tuples, intervals, unions, matrices or equations whose parts are the same.

Units, degrees, currency and \text{...} beside a value do not count. A percent sign that only one side has may be either
a unit (50% = 50) or a hundredth (50% = 0.5). Sets and bare lists have no order; tuples and intervals do.
"""

import re
from fractions import Fraction

from .math_values import Value, evaluate

_LONGEST_TEXT = 2000  # characters; anything longer is neither a number nor equal to anything
_LONGEST = 400  # characters without layout; longer answers are compared as text
_PLACES = 3
_TOLERANCE = 1e-9

_SYMBOLS = {
    "−": "-",
    "–": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "÷": r"\div ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "∪": r"\cup ",
    "∈": r"\in ",
    "±": r"\pm ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "°": "",
}
_SAME_COMMANDS = [
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
    (r"\\div(?![A-Za-z])", "/"),
    (r"\\(?:leq|leqslant)(?![A-Za-z])", r"\\le"),
    (r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge"),
    (r"\\[lr]?vert(?![A-Za-z])|\\[lr]?Vert(?![A-Za-z])", "|"),
    (r"\\lbrace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
]
_ROW = "\ue000"  # stands for the \\ between the rows of a matrix
_TEXT = re.compile(r"\\(?:text[a-z]*|mbox|hbox|mathrm)\s*\{([^{}]*)\}(?:\s*\^\s*\{?\d\}?)?")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")


def clean(text: str) -> str:
    """LaTeX without layout, fonts, units, currency and thousands separators; words when nothing but words is there."""
    text = re.sub(r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}", text).replace("√", r"\sqrt ")
    for symbol, replacement in _SYMBOLS.items():
        text = text.replace(symbol, replacement)
    text = text.replace("\\\\", _ROW)
    text = re.sub(r"\\[()\[\]]|\\!|(?<=\d)\\,(?=\d{3}(?!\d))", "", text)
    text = text.replace(r"\$", "").replace("$", "").replace(r"\%", "%").replace("{,}", ",").replace("**", "")
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])\s*\.?", "", text)
    text = re.sub(r"\\(?:[bB]igg?[lrm]?|displaystyle|textstyle|mathbf|mathit|boldsymbol|bm)(?![A-Za-z])", " ", text)
    text = re.sub(r"\\(?:quad|qquad)(?![A-Za-z])|\\[,;:> ]|~", " ", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![A-Za-z])", "", text)
    for pattern, replacement in _SAME_COMMANDS:
        text = re.sub(pattern, replacement, text)
    text = _without_text(text)
    text = re.sub(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)", r"\1\\frac{\2}{\3}", text)  # 3 1/2 is a mixed number
    text = re.sub(r"([_^])\s*\{\s*(\w)\s*\}", r"\1\2", text)
    text = re.sub(r"\+\s*(?=\\infty)", "", text)
    return _join_thousands(" ".join(text.split()).rstrip(" .,;:"))


def _without_text(text: str) -> str:
    r"""Text without \text{...}.

    Beside a value, \text{...} is a unit and goes. `and` and `or` separate the parts of a list.
    Alone, \text{...} is the answer.
    """
    text = re.sub(r"\\(?:text[a-z]*|mbox|mathrm)\s*\{\s*(?:and|or)\s*\}|\s(?:and|or)\s", ",", text)
    rest = _TEXT.sub(" ", text)
    return (
        rest
        if rest.strip(" .,;:=") and not rest.rstrip(" .").endswith(("=", "+", "-", "*", "/"))
        else _TEXT.sub(r" \1 ", text)
    )


def _join_thousands(text: str) -> str:
    """1,234 -> 1234 outside brackets; inside, the comma separates."""
    if "," not in text:
        return text
    out, start, depth = [], 0, 0
    for index, character in enumerate(text):
        change = (character in "([{") - (character in ")]}")
        if change and (depth == 0 or depth + change == 0):
            piece = text[start:index]
            out.append(_GROUPED.sub(lambda m: m[0].replace(",", ""), piece) if depth == 0 else piece)
            start = index
        depth = max(0, depth + change)
    piece = text[start:]
    out.append(_GROUPED.sub(lambda m: m[0].replace(",", ""), piece) if depth == 0 else piece)
    return re.sub(r"(?<=\\frac\{)[\d,]+(?=\})|(?<=\}\{)[\d,]+(?=\})", lambda m: m[0].replace(",", ""), "".join(out))


def exact_number(text: str) -> Fraction | None:
    r"""The number that `text` is, without units; else None.

    Understands `\$9{,}500`, `\frac{1}{2}`, `3\tfrac12`, `20\%` (20) and `x = 5`.
    """
    if len(text) > _LONGEST_TEXT:
        return None
    text = _side(clean(text)).rstrip("% ")
    for candidate in (text, _without_words(text)):
        value = evaluate(candidate)
        if isinstance(value, Fraction):
            return value
    return None


def plain(value: Fraction) -> str:
    """One spelling a number: 9500, 0.5, -18.25, 1/3."""
    places = next((p for p in range(31) if 10**p % value.denominator == 0), 0)
    if places == 0:
        return str(value)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def equal(answer: str, reference: str) -> bool:
    """Whether `answer` says the same as `reference`; False for an empty answer."""
    return max(len(answer), len(reference)) <= _LONGEST_TEXT and _same(clean(answer), clean(reference))


def _same(a: str, b: str) -> bool:
    a, b = a.strip(), b.strip()
    if not a or not b:
        return False
    x, y = _squeezed(a), _squeezed(b)
    if x == y or (x.casefold() == y.casefold() and re.search(r"(?<![\\A-Za-z])[A-Za-z]{3}", a)):  # words in any case
        return True
    if max(len(a), len(b)) > _LONGEST:
        return False
    try:
        return _same_by_parts(a, b)
    except RecursionError:
        return False


def _same_by_parts(a: str, b: str) -> bool:
    if bool(_MEMBER.search(a)) != bool(_MEMBER.search(b)):
        return _same(_MEMBER.split(a)[-1], _MEMBER.split(b)[-1])
    if a.endswith("%") != b.endswith("%"):
        share, other = (a, b) if a.endswith("%") else (b, a)
        share = share.rstrip("% ")
        return _same(share, other) or _same(f"({share})/100", other)
    rows_a, rows_b = _matrix(a), _matrix(b)
    if rows_a or rows_b:
        if [len(row) for row in rows_a] != [len(row) for row in rows_b]:
            return False
        return all(_all_same(x, y) for x, y in zip(rows_a, rows_b, strict=True))
    if r"\cup" in a or r"\cup" in b:
        return _all_same(a.split(r"\cup"), b.split(r"\cup"), ordered=False)
    kind_a, parts_a = _collection(a)
    kind_b, parts_b = _collection(b)
    if len(parts_a) > 1 or len(parts_b) > 1 or "set" in (kind_a, kind_b):
        unordered = kind_a in ("list", "set") and kind_b in ("list", "set")
        return (unordered or kind_a == kind_b) and _all_same(parts_a, parts_b, ordered=not unordered)
    sides_a, sides_b = _split(a, "="), _split(b, "=")
    if len(sides_a) > 1 or len(sides_b) > 1:
        return _same_equation(sides_a, sides_b)
    if bool(_BASE.search(a)) != bool(_BASE.search(b)):
        return _same(_BASE.sub("", a), _BASE.sub("", b))
    if _same_value(a, b):
        return True
    bare_a, bare_b = _without_words(a), _without_words(b)
    return (
        (bare_a, bare_b) != (a, b)
        and not (_LETTER.search(bare_a) or _LETTER.search(bare_b))
        and _same_value(bare_a, bare_b)
    )


_MEMBER = re.compile(r"\\in(?![A-Za-z])")
_BASE = re.compile(r"(?<=\d)_\{?\d+\}?$")  # 1011_2: the question names the base
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")


def _squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def _without_words(text: str) -> str:
    """A value followed by plain words, without them: `12 square cm` -> `12`."""
    found = re.fullmatch(r"(.*[\d})!])\s+[A-Za-z]{2,}(?:[\s-][A-Za-z]+)*(?:\s*\^\s*\{?\d\}?)?", text)
    return found[1] if found else text


def _split(text: str, separator: str) -> list[str]:
    """Split outside brackets; `=` of `<=` and its like does not separate."""
    parts, start, depth = [], 0, 0
    for index, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == separator and depth == 0 and text[max(0, index - 1) : index] not in ("<", ">", "!"):
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _side(text: str) -> str:
    """What an equation ends in."""
    return _split(text, "=")[-1].strip()


def _collection(text: str) -> tuple[str, list[str]]:
    r"""Kind and parts of a collection.

    `\{1,2\}` is a set and `1,2` a list. `(1,2)`, `[1,2)` and so on are kinds of their own. `a \pm b` is two parts.
    """
    kind, inner = "list", text
    if text.startswith(r"\{") and text.endswith(r"\}"):
        kind, inner = "set", text[2:-2]
    elif text[0] in "([" and text[-1] in ")]" and _closes_at_end(text) and len(_split(text[1:-1], ",")) > 1:
        kind, inner = text[0] + text[-1], text[1:-1]
    parts = []
    for part in _split(inner, ","):
        signs = ("+", "-") if r"\pm" in part else ("",)
        parts += [part.replace(r"\pm", s).replace(r"\mp", "-" if s == "+" else "+") if s else part for s in signs]
    return kind, parts


def _closes_at_end(text: str) -> bool:
    depth = 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return index == len(text) - 1
    return False


def _matrix(text: str) -> list[list[str]]:
    found = re.fullmatch(r"\\begin\{([a-zA-Z]*matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}", text)
    return [row.split("&") for row in found[2].strip(f" {_ROW}").split(_ROW)] if found else []


def _all_same(a: list[str], b: list[str], ordered: bool = True) -> bool:
    if len(a) != len(b):
        return False
    if ordered:
        return all(_same(x, y) for x, y in zip(a, b, strict=True))
    left = list(a)
    for wanted in b:
        index = next((i for i, x in enumerate(left) if _same(x, wanted)), None)
        if index is None:
            return False
        del left[index]
    return True


def _same_equation(a: list[str], b: list[str]) -> bool:
    """`x = 5` says `5`, and `4x = 2y` says `y - 2x = 0`."""
    if len(b) == 1:
        return _same(a[-1], b[0])
    if len(a) == 1:
        return bool(re.fullmatch(r"\s*[A-Za-z](?:_\w|\s*\([a-z]\))?\s*", b[0])) and _same(a[0], b[-1])
    if _squeezed(a[0]) == _squeezed(b[0]) and _same(a[-1], b[-1]):
        return True
    if len(a) != 2 or len(b) != 2:
        return False
    ratios = []
    for place in range(_PLACES):
        x, y = (evaluate(f"({left})-({right})", place) for left, right in (a, b))
        if x is None or y is None or x == 0 or y == 0:
            return False
        ratios.append(complex(x) / complex(y))
    return all(_close(r, ratios[0]) for r in ratios)


def _same_value(a: str, b: str) -> bool:
    for place in range(_PLACES):
        x, y = evaluate(a, place), evaluate(b, place)
        if x is None or y is None or not _close(x, y):
            return False
    return True


def _close(x: Value, y: Value) -> bool:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    try:
        return abs(complex(x) - complex(y)) <= _TOLERANCE * max(abs(complex(x)), abs(complex(y)))
    except OverflowError:
        return False
