"""The tasks for thinking models: extraction, grading, documents, and whole lm-eval runs on local data (case E1)."""

import json
import os
import random
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import lm_eval
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from replayssm_emulation import UsageError
from replayssm_tasks import (
    INVALID,
    NAMES,
    TASKS_PATH,
    documents,
    grading,
    hub_error,
    load_tasks,
    parse_task_data,
    progression,
    task_config,
    task_manager,
)
from replayssm_tasks.extract import answer_text, extract, last_box, reopen_thinking
from replayssm_tasks.math_answers import equal, exact_number, plain

DATA = Path(__file__).parent / "data"
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


@pytest.mark.parametrize("kind", ["number", "expression", "letter", "run"])
def test_long_and_odd_responses_take_no_time(kind) -> None:
    odd = [
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
    began = time.perf_counter()
    for response in odd:
        extract(kind, response, CHOICES)
        equal(response, "5")
    assert time.perf_counter() - began < 3


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


# Documents


def test_level5_filter() -> None:
    solution = r"so $\boxed{5}$."
    rows = [{"problem": str(level), "level": level, "solution": solution} for level in ("Level 5", 5, "5", "Level 4", 4, "Level ?", None)]
    assert [d["problem"] for d in documents.documents("replayssm_math_level5", rows, "test")] == ["Level 5", "5", "5"]
    unlabelled = [{"problem": "p", "answer": r"\frac12", "subject": "Algebra"}]
    assert documents.documents("replayssm_math_level5", unlabelled, "test") == [{"problem": "p", "answer": r"\frac12", "type": "Algebra"}]
    with pytest.raises(UsageError, match="no row of Level 5"):
        documents.documents("replayssm_math_level5", rows[3:], "test")


def gpqa_rows(n):
    wrong = {f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}
    return [{"Question": f"question {i}", "Correct Answer": "right", "High-level domain": "Physics"} | wrong for i in range(n)]


def test_choice_order_is_the_documents_own() -> None:
    rows = gpqa_rows(400)
    random.seed(1)
    state = random.getstate()
    first = documents.documents("replayssm_gpqa_diamond", rows, "test")
    assert random.getstate() == state
    random.seed(2)
    swapped = [row | {"Incorrect Answer 1": row["Incorrect Answer 3"], "Incorrect Answer 3": row["Incorrect Answer 1"]} for row in rows]
    assert documents.documents("replayssm_gpqa_diamond", list(reversed(swapped)), "test") == list(reversed(first))
    assert all(d["choices"]["ABCD".index(d["answer"])] == "right" for d in first)
    places = [sum(d["answer"] == letter for d in first) for letter in "ABCD"]
    assert min(places) > 70  # 100 expected, standard deviation 8.7
    assert first[0]["answer"] == documents.documents("replayssm_gpqa_diamond", rows[:1], "test")[0]["answer"]
    assert [d["answer"] for d in first[:8]] == list("AAADABBB")  # and in every process and version


@pytest.mark.parametrize(
    ("task", "row", "says"),
    [
        ("replayssm_gsm8k", {"question": "q"}, "row 0: no field 'answer'; found question"),
        ("replayssm_gsm8k", {"question": "q", "answer": "so #### none"}, "row 0: no number after ####"),
        ("replayssm_gsm8k", {"question": None, "answer": "#### 1"}, "question is not text but None"),
        ("replayssm_math_level5", {"problem": "p", "solution": "five"}, "no .boxed"),
        ("replayssm_gpqa_diamond", {"Question": "q", "Correct Answer": "a"}, "no field 'Incorrect Answer 1'"),
        ("replayssm_mmlu_pro", {"question": "q", "options": ["a", "b"], "answer": "C"}, "'C' is not the letter of one of 2 options"),
        ("replayssm_mmlu_pro", {"question": "q", "options": "a, b", "answer": "A"}, "not a JSON list"),
    ],
)
def test_bad_rows_are_named(task, row, says) -> None:
    with pytest.raises(UsageError, match=says):
        documents.documents(task, [row], "test")


def test_files_of_every_kind(tmp_path) -> None:
    rows = gpqa_rows(3)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("\ufeff" + "\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]))
    assert all(documents.read_rows(tmp_path / f"a{suffix}") == rows for suffix in documents.KINDS_OF_FILE)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("cut.jsonl", '{"a": 1}\n{"a": ', "line 2: not JSON"),
        ("object.json", '{"a": 1}', "not a list of rows"),
        ("numbers.jsonl", "1\n", "not a list of rows"),
        ("bad.json", "[", "cannot be read"),
        ("bad.parquet", "plain", "cannot be read"),
        ("a.txt", "x", "unknown kind of file"),
        ("missing.jsonl", None, "no such file"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, says) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=f"{name}.*{says}"):
        documents.read_rows(tmp_path / name)


# Whole runs of lm-eval


class CannedLM(LM):
    """Answers a prompt by a function of it; keeps the requests."""

    def __init__(self, reply) -> None:
        super().__init__()
        self.reply = reply
        self.requests: list = []

    def generate_until(self, requests, disable_tqdm=False):
        self.requests += [request.args for request in requests]
        return [self.reply(prompt) for prompt, _ in (request.args for request in requests)]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def evaluate(tasks, reply, **options):
    """(metrics, samples, requests) of the one task."""
    lm = CannedLM(reply)
    result = lm_eval.simple_evaluate(model=lm, tasks=tasks, task_manager=task_manager(), bootstrap_iters=0, **options)
    (name,) = result["results"]
    scores = {
        key.split(",")[0]: value
        for key, value in result["results"][name].items()
        if key.endswith(("match,final-answer", "extracted,final-answer"))
    }
    return scores, result["samples"][name], lm.requests


GSM8K_REPLIES = {  # by the beginning of the question; the right answers are 18, 3, 70000, 540, 20
    "Janet": r"<think>16-3-4=9, or \boxed{9}?</think>She makes \boxed{\$18} every day.",
    "A robe": r"<think>2 + 1</think>\boxed{4}",
    "Josh": r"no thinking: \boxed{$70{,}000}.",
    "James": "<think>3*3*60 = 540, so the answer is 540",
    "Every day, Wendi": "<think>60-40</think>20, altogether. \ud835",
}


def reply_by_beginning(replies):
    return lambda prompt: next(reply for beginning, reply in replies.items() if prompt.startswith(beginning))


def test_gsm8k_offline_from_end_to_end() -> None:
    tasks = load_tasks([task_config("gsm8k", data_path=DATA / "gsm8k_excerpt.jsonl", max_gen_toks=123)])
    scores, samples, requests = evaluate(tasks, reply_by_beginning(GSM8K_REPLIES))
    assert scores == {"exact_match": 0.6, "extracted": 0.8}
    assert [s["filtered_resps"] for s in samples] == [["18"], ["4"], ["70000"], [INVALID], ["20"]]
    assert [(s["exact_match"], s["extracted"]) for s in samples] == [(1, 1), (0, 1), (1, 1), (0, 0), (1, 1)]
    assert [s["target"] for s in samples] == ["18", "3", "70000", "540", "20"]
    assert requests[0][0].endswith("\n\nReason step by step, and put your final answer, a single number, within \\boxed{}.")
    assert requests[0][1] == {"max_gen_toks": 123, "do_sample": False, "until": []}


def test_math_level5_offline_from_end_to_end() -> None:
    replies = {
        "What is the smallest value": r"<think>3/2 or -1/8</think>$x = \boxed{-0.125}$",
        "Find the domain": r"\boxed{x \in (-\infty,-7) \cup (3,\infty) \cup (-7,3)}",
        "A shirt's": "<think>14.40/.4</think>\n\n**Final Answer**: $36$ dollars",
        "Between what": r"\boxed{13 \text{ and } 14}",
        "What is the area": "It is hard to say.",
    }
    config = task_config("math_level5", data_path=DATA / "math_level5_excerpt.jsonl")
    scores, samples, requests = evaluate([config], reply_by_beginning(replies), gen_kwargs="max_gen_toks=64,do_sample=True,temperature=0.6")
    assert scores == {"exact_match": 0.6, "extracted": 0.8}
    right = {s["doc"]["answer"]: (s["exact_match"], s["extracted"]) for s in samples}
    assert right[r"-\frac{1}{8}"] == right[r"(-\infty, -7)\cup(-7, 3)\cup(3, \infty)"] == right[r"\$36"] == (1, 1)
    assert right[r"12\text{ and }13"] == (0, 1)
    assert right[r"100\text{ square units}"] == (0, 0)
    assert requests[0][1] == {"max_gen_toks": 64, "do_sample": True, "temperature": 0.6, "until": []}


def test_choices_from_end_to_end(tmp_path) -> None:
    (tmp_path / "gpqa.json").write_text(json.dumps(gpqa_rows(6)))
    tasks = load_tasks([task_config("gpqa_diamond", data_path=tmp_path / "gpqa.json")])
    scores, samples, requests = evaluate(tasks, lambda prompt: next(line for line in prompt.split("\n") if line.endswith(") right")))
    assert scores == {"exact_match": 1.0, "extracted": 1.0}
    for sample, (prompt, _) in zip(samples, requests, strict=True):
        assert "where X is the letter of the right choice (A to D).\n\nquestion" in prompt
        assert prompt.endswith("\n\n" + "\n".join(f"{x}) {c}" for x, c in zip("ABCD", sample["doc"]["choices"], strict=True)))
        assert sample["filtered_resps"] == [sample["target"]]
    (tmp_path / "mmlu.json").write_text(
        json.dumps([{"question": "1+1?", "options": list("0123456789"), "answer": "C", "category": "math"}])
    )
    tasks = load_tasks([task_config("mmlu_pro", data_path=tmp_path / "mmlu.json")])
    scores, _, requests = evaluate(tasks, lambda prompt: "<think>A?</think>Answer: C")
    assert scores == {"exact_match": 1.0, "extracted": 1.0}
    assert "(A to J)" in requests[0][0]


def test_progression_from_end_to_end() -> None:
    answers = {d["prompt"]: d["answer"] for d in progression.documents(4, seed=5, lengths=(1, 200), letters=3)}
    prompts = list(answers)

    def reply(prompt):
        return {0: answers[prompt], 1: answers[prompt][:-1], 2: answers[prompt].replace("a", "b", 1)}.get(prompts.index(prompt), "!")

    settings = {"progression_documents": 4, "progression_seed": 5, "progression_lengths": [1, 200], "progression_letters": 3}
    config = task_config("progression", metadata=settings)
    scores, samples, requests = evaluate(load_tasks([config]), reply)
    assert [request[0] for request in requests] == prompts
    assert scores == {"exact_match": 0.25, "extracted": 0.5}
    assert samples[0]["filtered_resps"] == [answers[prompts[0]]]
    assert samples[1]["filtered_resps"] == samples[3]["filtered_resps"] == [INVALID]
    (task,) = load_tasks(["progression"])
    assert len(task.eval_docs) == 200


def test_by_name_in_lm_eval_alone() -> None:
    """As with `lm_eval run --include_path`: metadata of the command line reaches the generator, model arguments do not disturb it."""
    manager = TaskManager(
        include_path=str(TASKS_PATH), include_defaults=False, metadata={"progression_documents": 3, "seed": 7, "pretrained": "x"}
    )
    assert set(NAMES) <= set(manager.all_subtasks)
    assert manager.all_tasks == sorted(NAMES)
    (task,) = manager.load(["replayssm_progression"])["tasks"].values()
    assert len(task.eval_docs) == 3


def test_configurations_are_fresh_and_checked(tmp_path) -> None:
    first = task_config("replayssm_gsm8k")
    first["generation_kwargs"]["until"].append("x")
    assert task_config("gsm8k")["generation_kwargs"] == {"max_gen_toks": 32768, "do_sample": False, "until": []}
    for name in NAMES:
        config = task_config(name)
        assert (config["num_fewshot"], config["test_split"]) == (0, "train" if "gpqa" in name else "test")
        assert [m["metric"] for m in config["metric_list"]] == ["exact_match", "extracted"]
    assert parse_task_data(["gsm8k=a=b.jsonl"]) == {"replayssm_gsm8k": "a=b.jsonl"}
    for call, says in (
        (lambda: task_config("gsm9k"), "unknown task 'gsm9k'; known: replayssm_gpqa_diamond"),
        (lambda: task_config("progression", data_path="x.jsonl"), "is generated and takes no data"),
        (lambda: task_config("gsm8k", data_path=tmp_path / "x.jsonl"), "x.jsonl: no such file"),
        (lambda: task_config("mmlu_pro", data_path=DATA / "gsm8k_excerpt.jsonl"), "row 0: no field 'options'; found question, answer"),
        (lambda: task_config("gsm8k", max_gen_toks=0), "max_gen_toks must be positive"),
        (lambda: parse_task_data(["gsm8k"]), "write NAME=PATH"),
    ):
        with pytest.raises(UsageError, match=says):
            call()


OFFLINE = """
import time
from lm_eval.api import task
from replayssm_tasks import load_tasks, task_config
config = task_config("gpqa_diamond")
began = time.perf_counter()
try:
    load_tasks([config], offline={offline})
except ValueError as error:
    print(type(error).__name__, int(time.perf_counter() - began), error, sep="|")
"""


@pytest.mark.parametrize(("offline", "switch"), [(True, {}), (False, {"HF_HUB_OFFLINE": "1"})], ids=["argument", "environment"])
def test_no_hub_is_one_line_within_seconds(tmp_path, offline, switch) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    environment |= {"HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path), **switch}
    script = OFFLINE.format(offline=offline)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True)
    (line,) = done.stdout.splitlines()
    kind, seconds, message = line.split("|")
    assert kind == "UsageError"
    assert int(seconds) < 5
    assert message.startswith("replayssm_gpqa_diamond: data set Idavidrein/gpqa (gpqa_diamond) cannot be had: ")
    assert message.endswith("; pass --task-data replayssm_gpqa_diamond=PATH (.jsonl, .json, .parquet, .csv)")


def test_a_gated_data_set_says_what_to_accept() -> None:
    reason = FileNotFoundError("Dataset 'a/b' is a gated dataset on the Hub. You must be authenticated to access it.")
    error = str(hub_error("replayssm_gpqa_diamond", "a/b", None, reason))
    assert error.endswith(
        "accept its terms on the hub and set HF_TOKEN, or pass --task-data replayssm_gpqa_diamond=PATH (.jsonl, .json, .parquet, .csv)"
    )
