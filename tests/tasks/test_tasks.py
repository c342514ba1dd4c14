"""The tasks for thinking models: documents, and whole lm-eval runs on local data (case E1)."""

import json
import os
import random
import subprocess
import sys
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
    hub_error,
    load_tasks,
    parse_task_data,
    progression,
    task_config,
    task_manager,
)

DATA = Path(__file__).parents[1] / "data"
CHOICES = {"choices": ["12 N", "7.5 N", r"$\frac{1}{2}$ N", "A force cannot be given", "0.25"]}


# Documents


def test_level5_filter() -> None:
    solution = r"so $\boxed{5}$."
    rows = [
        {"problem": str(level), "level": level, "solution": solution}
        for level in ("Level 5", 5, "5", "Level 4", 4, "Level ?", None)
    ]
    assert [d["problem"] for d in documents.documents("replayssm_math_level5", rows, "test")] == ["Level 5", "5", "5"]
    unlabelled = [{"problem": "p", "answer": r"\frac12", "subject": "Algebra"}]
    assert documents.documents("replayssm_math_level5", unlabelled, "test") == [
        {"problem": "p", "answer": r"\frac12", "type": "Algebra"}
    ]
    with pytest.raises(UsageError, match="no row of Level 5"):
        documents.documents("replayssm_math_level5", rows[3:], "test")


def gpqa_rows(n):
    wrong = {f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}
    return [
        {"Question": f"question {i}", "Correct Answer": "right", "High-level domain": "Physics"} | wrong
        for i in range(n)
    ]


def test_choice_order_is_the_documents_own() -> None:
    rows = gpqa_rows(400)
    random.seed(1)
    state = random.getstate()
    first = documents.documents("replayssm_gpqa_diamond", rows, "test")
    assert random.getstate() == state
    random.seed(2)
    swapped = [
        row | {"Incorrect Answer 1": row["Incorrect Answer 3"], "Incorrect Answer 3": row["Incorrect Answer 1"]}
        for row in rows
    ]
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
        (
            "replayssm_mmlu_pro",
            {"question": "q", "options": ["a", "b"], "answer": "C"},
            "'C' is not the letter of one of 2 options",
        ),
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
    (tmp_path / "a.csv").write_text(
        "\ufeff" + "\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)])
    )
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
    assert requests[0][0].endswith(
        "\n\nReason step by step, and put your final answer, a single number, within \\boxed{}."
    )
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
    scores, samples, requests = evaluate(
        [config], reply_by_beginning(replies), gen_kwargs="max_gen_toks=64,do_sample=True,temperature=0.6"
    )
    assert scores == {"exact_match": 0.6, "extracted": 0.8}
    right = {s["doc"]["answer"]: (s["exact_match"], s["extracted"]) for s in samples}
    assert right[r"-\frac{1}{8}"] == right[r"(-\infty, -7)\cup(-7, 3)\cup(3, \infty)"] == right[r"\$36"] == (1, 1)
    assert right[r"12\text{ and }13"] == (0, 1)
    assert right[r"100\text{ square units}"] == (0, 0)
    assert requests[0][1] == {"max_gen_toks": 64, "do_sample": True, "temperature": 0.6, "until": []}


def test_choices_from_end_to_end(tmp_path) -> None:
    (tmp_path / "gpqa.json").write_text(json.dumps(gpqa_rows(6)))
    tasks = load_tasks([task_config("gpqa_diamond", data_path=tmp_path / "gpqa.json")])
    scores, samples, requests = evaluate(
        tasks, lambda prompt: next(line for line in prompt.split("\n") if line.endswith(") right"))
    )
    assert scores == {"exact_match": 1.0, "extracted": 1.0}
    for sample, (prompt, _) in zip(samples, requests, strict=True):
        assert "where X is the letter of the right choice (A to D).\n\nquestion" in prompt
        assert prompt.endswith(
            "\n\n" + "\n".join(f"{x}) {c}" for x, c in zip("ABCD", sample["doc"]["choices"], strict=True))
        )
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
        return {0: answers[prompt], 1: answers[prompt][:-1], 2: answers[prompt].replace("a", "b", 1)}.get(
            prompts.index(prompt), "!"
        )

    settings = {
        "progression_documents": 4,
        "progression_seed": 5,
        "progression_lengths": [1, 200],
        "progression_letters": 3,
    }
    config = task_config("progression", metadata=settings)
    scores, samples, requests = evaluate(load_tasks([config]), reply)
    assert [request[0] for request in requests] == prompts
    assert scores == {"exact_match": 0.25, "extracted": 0.5}
    assert samples[0]["filtered_resps"] == [answers[prompts[0]]]
    assert samples[1]["filtered_resps"] == samples[3]["filtered_resps"] == [INVALID]
    (task,) = load_tasks(["progression"])
    assert len(task.eval_docs) == 512


def test_by_name_in_lm_eval_alone() -> None:
    """With `lm_eval run --include_path` the generator gets the metadata of the command line, no model arguments."""
    manager = TaskManager(
        include_path=str(TASKS_PATH),
        include_defaults=False,
        metadata={"progression_documents": 3, "seed": 7, "pretrained": "x"},
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
        (
            lambda: task_config("mmlu_pro", data_path=DATA / "gsm8k_excerpt.jsonl"),
            "row 0: no field 'options'; found question, answer",
        ),
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


@pytest.mark.parametrize(
    ("offline", "switch"), [(True, {}), (False, {"HF_HUB_OFFLINE": "1"})], ids=["argument", "environment"]
)
def test_no_hub_is_one_line_within_seconds(tmp_path, offline, switch) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    environment |= {"HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path), **switch}
    script = OFFLINE.format(offline=offline)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
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
        "accept its terms on the hub and set HF_TOKEN, or pass --task-data replayssm_gpqa_diamond=PATH "
        "(.jsonl, .json, .parquet, .csv)"
    )
