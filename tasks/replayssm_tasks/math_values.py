"""The value of a written expression: exact where it is rational, a reader by recursive descent."""

import cmath
import hashlib
import math
import re
from collections.abc import Callable
from fractions import Fraction

Value = Fraction | float | complex
_LONGEST = 400  # characters without layout; longer answers are compared as text


def _sample(name: str, place: int) -> float:
    """A fixed value in [0.5, 2.5) for a variable at one of the places."""
    return 0.5 + int.from_bytes(hashlib.sha256(f"{place}{name}".encode()).digest()[:6], "big") / 2**47


def evaluate(text: str, place: int | None = None) -> Value | None:
    """The value of a cleaned expression: a Fraction where it is rational, None where it cannot be read or has no value.

    place: which values the variables have; None allows no variable.
    """
    if len(text) > _LONGEST:
        return None
    try:
        value = _Reader(text, place).whole()
        return None if isinstance(value, float | complex) and not cmath.isfinite(value) else value
    except (_UnreadableError, ArithmeticError, ValueError, RecursionError):
        return None


class _UnreadableError(Exception):
    pass


_TOKEN = re.compile(r"\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|\\.|[A-Za-z]+|\S")
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "cot": lambda x: 1 / cmath.tan(x),
    "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x),
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "ln": cmath.log,
    "exp": cmath.exp,
}
_GREEK = {
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "theta",
    "lambda",
    "mu",
    "nu",
    "rho",
    "sigma",
    "tau",
    "phi",
    "omega",
}
_NO_FACTOR = {"", *r"+-*/^_!,;:=<>&%)]}'"}
_EXACT_BITS = 40_000  # larger powers are compared as text


class _Reader:
    """Reads and computes in one pass, by recursive descent: sum, product (`*`, `/` or nothing), sign, power, atom."""

    def __init__(self, text: str, place: int | None) -> None:
        self.tokens = [t for found in _TOKEN.findall(text) for t in self._letters(found)]
        self.at = 0
        self.place = place
        self.bars = 0

    @staticmethod
    def _letters(token: str) -> list[str]:
        if not token[0].isalpha():
            return [token]
        if token in _FUNCTIONS or token in ("log", "sqrt", "pi"):
            return ["\\" + token]
        if len(token) > 2:  # a word, not a product of variables
            raise _UnreadableError
        return list(token)

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def expect(self, token: str) -> None:
        if self.next() != token:
            raise _UnreadableError

    def whole(self) -> Value:
        value = self.sum()
        if self.peek():
            raise _UnreadableError
        return value

    def sum(self) -> Value:
        value = self.product()
        while self.peek() in ("+", "-"):
            value = value + self.product() if self.next() == "+" else value - self.product()
        return value

    def product(self) -> Value:
        value = self.signed()
        while True:
            token = self.peek()
            if token == "*":
                self.next()
                value = value * self.signed()
            elif token == "/":
                self.next()
                value = value / self.signed()
            elif self._starts_factor(token):
                if token[0].isdigit() and self.tokens[self.at - 1][0].isdigit():
                    raise _UnreadableError  # two numbers side by side
                value = value * self.power()
            else:
                return value

    def _starts_factor(self, token: str) -> bool:
        return token not in _NO_FACTOR and (token != "|" or not self.bars)

    def signed(self) -> Value:
        if self.peek() in ("+", "-"):
            return -self.signed() if self.next() == "-" else self.signed()
        return self.power()

    def power(self) -> Value:
        base = self.atom()
        while self.peek() == "!":
            self.next()
            if not isinstance(base, Fraction) or base.denominator != 1 or not 0 <= base <= 3000:
                raise _UnreadableError
            base = Fraction(math.factorial(int(base)))
        if self.peek() != "^":
            return base
        self.next()
        if self.peek() == "-":
            self.next()
            return _power(base, -self.argument(whole_number=True))
        return _power(base, self.argument(whole_number=True))

    def argument(self, whole_number: bool = False) -> Value:
        r"""{...}, (...) or one token.

        Of a number it takes the first digit only, as LaTeX reads \frac12, unless `whole_number`.
        """
        token = self.peek()
        if token[:1].isdigit() and len(token) > 1 and not whole_number:
            if "." in token:
                raise _UnreadableError
            self.tokens[self.at] = token[1:]
            return Fraction(token[0])
        return self.atom(mixed=False)

    def group(self, closing: str) -> Value:
        bars, self.bars = self.bars, 0
        value = self.sum()
        self.bars = bars
        self.expect(closing)
        return value

    def atom(self, mixed: bool = True) -> Value:
        token = self.next()
        if token[:1].isdigit() or (token[:1] == "." and len(token) > 1):
            number = Fraction(token)
            return number + self.proper_fraction() if mixed and token.isdigit() and self.peek() == r"\frac" else number
        if token in ("(", "[", "{"):
            return self.group({"(": ")", "[": "]", "{": "}"}[token])
        if token == "|":
            self.bars += 1
            value = self.sum()
            self.bars -= 1
            self.expect("|")
            return abs(value) if isinstance(value, Fraction) else abs(complex(value))
        if token.startswith("\\"):
            return self.command(token[1:])
        if token.isalpha() and len(token) == 1:
            return self.letter(token)
        raise _UnreadableError

    def proper_fraction(self) -> Fraction:
        r"""The \frac of a mixed number: digits over larger digits. Anything else is a factor, left unread (0)."""
        start, tokens = self.at, list(self.tokens)
        self.next()
        top, bottom = (self._digits() for _ in range(2))
        if top and bottom and int(top) < int(bottom) and self.peek() not in ("^", "!"):
            return Fraction(int(top), int(bottom))
        self.at, self.tokens = start, tokens
        return Fraction(0)

    def _digits(self) -> str:
        token = self.peek()
        if token.isdigit():
            return str(int(self.argument()))  # type: ignore[arg-type]
        if self.tokens[self.at : self.at + 3][0::2] == ["{", "}"] and self.tokens[self.at + 1].isdigit():
            self.at += 3
            return self.tokens[self.at - 2]
        return ""

    def letter(self, letter: str) -> Value:
        if letter == "i":
            return 1j
        if letter == "e":
            return math.e
        return self.named(letter)

    def named(self, name: str) -> Value:
        if self.peek() == "_":
            self.next()
            name += "_" + self.next()
            if name.endswith("{"):
                while (token := self.next()) not in ("}", ""):
                    name += token
        if self.place is None:
            raise _UnreadableError
        return _sample(name, self.place)

    def command(self, name: str) -> Value:
        if name == "frac":
            top = self.argument()
            return top / self.argument()
        if name == "sqrt":
            degree: Value = Fraction(2)
            if self.peek() == "[":
                self.next()
                degree = self.group("]")
            return _root(self.argument(), degree)
        if name == "pi":
            return math.pi
        if name == "log":
            base: Value = Fraction(10)
            if self.peek() == "_":
                self.next()
                base = self.argument()
            return cmath.log(self.power()) / cmath.log(base)
        if name in _FUNCTIONS:
            exponent: Value = Fraction(1)
            if self.peek() == "^":
                self.next()
                exponent = self.argument()
            return _power(_FUNCTIONS[name](complex(self.power())), exponent)
        if name in _GREEK:
            return self.named(name)
        raise _UnreadableError


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        if not isinstance(base, Fraction):
            return complex(base) ** int(exponent)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) > _EXACT_BITS:
            raise _UnreadableError
        return base ** int(exponent)
    return complex(base) ** complex(exponent)


def _root(value: Value, degree: Value) -> Value:
    """A root, exact where it is rational; the real one for an odd root of a negative number."""
    if isinstance(value, Fraction) and isinstance(degree, Fraction) and degree.denominator == 1 and 2 <= degree <= 64:
        n = int(degree)
        sign = -1 if value < 0 and n % 2 else 1
        top, bottom = _whole_root(sign * value.numerator, n), _whole_root(value.denominator, n)
        if top is not None and bottom is not None:
            return sign * Fraction(top, bottom)
        if value < 0 and n % 2:
            return -(float(-value) ** (1 / n))
    return complex(value) ** (1 / complex(degree))


def _whole_root(value: int, n: int) -> int | None:
    if value < 0:
        return None
    root = math.isqrt(value) if n == 2 else round(value ** (1 / n))
    return root if root**n == value else None
