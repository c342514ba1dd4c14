"""From a response to a score: the thinking part, extraction of the answer, its grading (case E1)."""

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from replayssm_tasks import (
    INVALID,
    grading,
)
from replayssm_tasks.extract import answer_text, extract, last_box, reopen_thinking
from replayssm_tasks.math_answers import equal, exact_number, plain

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
CHOICES = {"choices": ["12 N", "7.5 N", r"$\frac{1}{2}$ N", "A force cannot be given", "0.25"]}


# Thinking


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("<think> maybe 12, then 17", None),
        ("<think>a\n\nb</think> 42", " 42"),
        ("a</think> 1 </think> 2", " 2"),
        ("no thinking: 3", "no thinking: 3"),
        ("<think>a</think> 5, wait <think> 6", None),
        ("<think>a", None),
        ("reasoning that the template opened</think>4", "4"),
        ("", ""),
    ],
)
def test_only_what_follows_the_thinking_counts(response, text) -> None:
    assert answer_text(response) == text


def test_thinking_that_the_prompt_opened() -> None:
    assert extract("number", "so it is 12, or 17", {}) == "17"
    assert extract("number", reopen_thinking("user: 5+7\nassistant: <think>\n", "so it is 12, or 17"), {}) is None
    assert extract("number", reopen_thinking("user: 5+7\nassistant: <think>\n", "so 12</think> 12"), {}) == "12"
    assert extract("number", reopen_thinking("assistant: <think>\n\n</think>\n\n", "12"), {}) == "12"


# Extraction


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1}, no, \boxed{2}.", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\boxed{\boxed{5}}", "5"),
        (r"$\boxed 7$", "7"),
        (r"\boxed7.", "7"),
        (r"\fbox{9}", "9"),
        (r"in \boxed{}: \boxed{3}. I used \boxed{}.", "3"),
        (r"\boxed{3} or rather \boxed{4", ""),
        (r"\boxedx{3}", None),
        ("none", None),
    ],
)
def test_last_box(text, content) -> None:
    assert last_box(text) == content


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{72}", "72"),
        (r"So \boxed{$9{,}500} it is.", "9500"),
        (r"\boxed{\$9,500.00}", "9500"),
        (r"\boxed{10\,000}", "10000"),
        (r"\boxed{1,234,567}", "1234567"),
        (r"\boxed{72, altogether.}", "72"),
        ("72, altogether.", "72"),
        (r"\boxed{3}. Check: no. \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\dfrac{1}{3}}", "1/3"),
        (r"\boxed{1/2}", "0.5"),
        (r"\boxed{.5}", "0.5"),
        (r"\boxed{2\frac{1}{2}}", "2.5"),
        (r"\boxed{18 \text{ dollars}}", "18"),
        (r"\boxed{18\text{ cm}^2}", "18"),
        (r"\boxed{18 eggs}", "18"),
        (r"\boxed{20\%}", "20"),
        (r"\boxed{-5}", "-5"),
        (r"\boxed{−5}", "-5"),
        (r"\boxed{-\$5}", "-5"),
        (r"\boxed{x = 5}", "5"),
        (r"\boxed{5 + 3 = 8}", "8"),
        (r"\boxed{5 of the 20}", "5"),
        (r"\boxed{\text{Total: } 40}", "40"),
        ("**Answer: 1,450**", "1450"),
        ("The answer is 72 of the 100 apples.\nI am sure.", "72"),
        ("The answer is 9 * 2 = $18.", "18"),
        ("#### 70000", "70000"),
        ("<think>\\boxed{1}</think>She earns 9 * 2 = 18 dollars.", "18"),
        ("<think>\\boxed{1}", None),
        ("<think>\\boxed{1}</think>", None),
        ("<think>x</think>I cannot tell.", None),
        (r"first \boxed{3}, then \boxed{4", None),
        (r"\boxed{\text{none}}", None),
        ("a half surrogate \ud835 and 6", "6"),
    ],
)
def test_numbers(response, answer) -> None:
    assert extract("number", response, {}) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{x^2 +  1}", "x^2 + 1"),
        (r"\boxed{(-\infty, 2) \cup (3, \infty)}", r"(-\infty, 2) \cup (3, \infty)"),
        (r"The final answer is $\frac{1}{2}$. Done.", r"\frac{1}{2}"),
        (r"Final Answer: \( 2\sqrt{3} \)", r"2\sqrt{3}"),
        ("**Final answer:**\n\n$$x+1$$", "x+1"),
        ("The answer is 5. I checked it.", "5"),
        ("The answer is 5 apples.", "5 apples"),
        ("<think>a\n\nb</think> 42", "42"),
        (r"<think>\boxed{7}</think>\frac12", r"\frac12"),
        ("It is hard to say", None),
        ("One of 3 cases\nremains open", None),
        (r"<think>so \boxed{5}", None),
        (r"\boxed{\frac{1}{2}", None),
    ],
)
def test_expressions(response, answer) -> None:
    assert extract("expression", response, {}) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("(C)", "C"),
        ("C.", "C"),
        ("c", "C"),
        ("Answer: C", "C"),
        ("answer: (c)", "C"),
        ("**Answer: C**", "C"),
        ("Answer: **C**", "C"),
        ("**Answer:** C) because of the units", "C"),
        ("Answer:\n\nC", "C"),
        ("The correct answer is (B) 7.5 N.", "B"),
        ("The correct option is B, since it moves.", "B"),
        (r"\boxed{C}", "C"),
        (r"\boxed{\text{C}}", "C"),
        (r"\boxed{\textbf{(C)}}", "C"),
        (r"\boxed{\mathrm{c}}", "C"),
        (r"\boxed{C. $\frac{1}{2}$ N}", "C"),
        (r"\boxed{\text{(B) } 7.5 \text{ N}}", "B"),
        (r"\boxed{7.5\text{ N}}", "B"),
        (r"\boxed{\frac14}", "E"),
        ("Answer: 12 N", "A"),
        ("Answer: $C$<|im_end|>", "C"),
        ("B) 7.5 N", "B"),
        ("Answer: A\nNo, wait. Answer: B", "B"),
        ("The answer is A because it is heavy", "A"),
        ("Answer: C. The answer is based on symmetry.", "C"),
        ("<think>Answer: A</think>Answer: D", "D"),
        ("The answer is a force of some kind", None),
        ("The answer is A force of some kind", None),
        ("Answer: A or B", None),
        ("Answer: C, D", None),
        (r"\boxed{A, B}", None),
        ("Answer: J", None),
        ("Answer: Boron", None),
        ("C is what I would have said, were it not for the sign", None),
        ("<think>Answer: A", None),
        (r"Answer: A \boxed{B", None),
        ("", None),
    ],
)
def test_letters(response, answer) -> None:
    assert extract("letter", response, CHOICES) == answer


ODD = [
    r"\boxed{" * 5000,
    "{" * 50_000,
    "the answer is " * 5000,
    "((((" * 20_000,
    "=" * 50_000,
    "1," * 50_000,
    "9^9^9^9",
    r"\boxed{9^{9^{9}}}",
    r"\boxed{" + "9" * 5000 + "}",
    r"\boxed{" + "(" * 390 + "}",
    r"\boxed{\frac{1}{0}}",
    "* _" * 30_000,
    "0.0.0" + "a0" * 50_000,
]
READ_ODD = """
import sys
from replayssm_tasks.extract import extract
from replayssm_tasks.math_answers import equal
from tests.tasks.test_extract import CHOICES, ODD
for response in ODD:
    extract(sys.argv[1], response, CHOICES)
    equal(response, "5")
"""


@pytest.mark.parametrize("kind", ["number", "expression", "letter", "run"])
def test_long_and_odd_responses_come_to_an_end(kind) -> None:
    """A pattern that backtracks, or a tower of powers, takes hours. The whole list takes seconds."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", READ_ODD, kind], cwd=ROOT, env=environment, timeout=300, check=True)


# Grading


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (r"\frac{1}{2}", "1/2"),
        (r"\dfrac12", "0.5"),
        (".50", r"\tfrac{1}{2}"),
        (r"-\frac{1}{8}", r"\frac{-1}{8}"),
        (r"3\frac18", "25/8"),
        ("3 1/8", "3.125"),
        (r"1{,}000", "1000"),
        (r"12,\!000,\!085", "12000085"),
        (r"\$18.90", "18.9"),
        ("10 square units", r"10\text{ square units}"),
        (r"5\mbox{ cm}^2", "5"),
        (r"30^\circ", "30"),
        ("30°", "30"),
        (r"50\%", "50"),
        ("50%", "0.5"),
        ("x = 5", "5"),
        ("5", "x=5"),
        ("y = 3 + 2x", "y = 2x+3"),
        ("2x + 3", "y=2x+3"),
        ("4x - 5y + 50 = 0", "4x-5y=-50"),
        (r"\sqrt{12}", r"2\sqrt{3}"),
        (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt{3}}"),
        (r"2\sqrt3 + 1", r"1+2\sqrt{3}"),
        (r"\frac{1}{2}\pi", r"\frac{\pi}{2}"),
        ("(x+1)^2", "x^2+2x+1"),
        (r"\frac{1}{2-x}", r"-\frac{1}{x-2}"),
        (r"\frac{1}{2004!}", "1/2004!"),
        (r"3^{2007}", "3*3^{2006}"),
        ("2i+1", "1+2i"),
        (r"\sqrt[3]{27}", "3"),
        (r"1.5\times10^{3}", "1500"),
        ("|−3|", "3"),
        ("-1, 2", "2,-1"),
        (r"\{1, 2\}", "2, 1"),
        (r"12\text{ and }13", "12, 13"),
        ("12 and 13", "12, 13"),
        ("x = 1 or x = 2", "2, 1"),
        (r"\{1\pm\sqrt{5},-2\}", r"-2, 1+\sqrt5, 1-\sqrt5"),
        (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
        (r"\left( \frac{1}{2}, 3 \right)", "(0.5,3)"),
        (r"(-\infty, 2)\cup(3,\infty)", r"(3, +\infty) \cup (-\infty,2)"),
        (r"x \in [2,5)", r"\left[2,5\right)"),
        (r"\begin{pmatrix} 1/2 \\ -3 \end{pmatrix}", r"\begin{pmatrix}0.5\\-3\end{pmatrix}"),
        ("1011_2", r"1011_{2}"),
        ("1011", "1011_2"),
        (r"\text{Friday}", "friday"),
        (r"\text{(A)}", "(A)"),
        ("5.", "5"),
    ],
)
def test_equal(answer, reference) -> None:
    assert equal(answer, reference)
    assert equal(reference, answer) or "=" in reference or "=" in answer


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("", "5"),
        (INVALID, "5"),
        ("5", "6"),
        ("0.333", r"\frac{1}{3}"),
        ("1.41", r"\sqrt{2}"),
        ("31/2", "3 1/2"),
        (r"2\frac{3}{2}", "3.5"),
        ("0.5%", "50%"),
        ("12", "1,2"),
        ("(1,2)", "(2,1)"),
        ("[2,5)", "(2,5)"),
        ("1", "1, 1"),
        ("1, 1, 2", "1, 2, 2"),
        (r"(-\infty, 2)", r"(-\infty, 2)\cup(3,\infty)"),
        ("x+1", "x-1"),
        ("xy", "x+y"),
        ("4x - 5y = 50", "4x-5y=-50"),
        ("x=5", "y=5"),
        ("1011_2", "1011_3"),
        ("no", "on the left"),
        ("dod", r"\text{odd}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
        ("4ab", "4"),
        (r"\frac{1}{0}", r"\frac{2}{0}"),
        ("1:2", "1:3"),
    ],
)
def test_not_equal(answer, reference) -> None:
    assert not equal(answer, reference)
    assert not equal(reference, answer)


def test_an_equation_is_not_its_right_side_unless_it_names_a_value() -> None:
    assert not equal("13", "x^2 + y^2 = 13")
    assert equal("5 + 3 = 8", "8")


def test_an_answer_can_be_written_to_a_file() -> None:
    assert grading.filtered("expression", "\\boxed{x\ud835}", {}) == "x?"
    assert grading.filtered("letter", "Answer: \ud835", CHOICES) == INVALID


def test_numbers_have_one_spelling() -> None:
    assert [plain(Fraction(x)) for x in ("9500", "1/2", "-73/4", "1/3", "-5", "0", "1/1024", "5/100")] == [
        "9500", "0.5", "-18.25", "1/3", "-5", "0", "0.0009765625", "0.05",
    ]  # fmt: skip
    assert exact_number("x") is None
    assert exact_number(r"\pi") is None
