"""The accuracy run on a tiny random model: arms stay apart, and a kill loses a block and changes nothing."""

import json
import logging
import sys
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
import replayssm_tasks
import torch
from lm_eval.models.huggingface import HFLM
from replayssm_emulation import UsageError
from replayssm_tasks import progression
from transformers import AutoTokenizer, NemotronHConfig, NemotronHForCausalLM

from replayssm_eval.accuracy.options import AccuracyOptions
from replayssm_eval.accuracy.run import CONTROL, planned_arms, run_accuracy
from replayssm_eval.models.loading import Loaded, load, location_of
from replayssm_eval.quartiles.run import run_quartiles
from replayssm_eval.results.provenance import code_digest

TASK = "replayssm_progression"
SHORT = {
    "schemes": ["nvfp4@5"],
    "limit": 5,
    "batch_size": 2,
    "max_gen_toks": 12,
    "metadata": {"progression_lengths": [30, 60]},
}


@pytest.fixture(scope="module")
def tiny():
    """Reads and writes the testbed's tokens, knows nothing, costs nothing."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tokenizer = AutoTokenizer.from_pretrained(location_of("tiny-mamba2"))
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=len(tokenizer), hidden_size=16, hybrid_override_pattern="MM*", intermediate_size=16,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, mamba_num_heads=2, mamba_head_dim=10,
        ssm_state_size=16, n_groups=1, chunk_size=32,
    )  # fmt: skip
    model = NemotronHForCausalLM(config).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    return Loaded(model, tokenizer, {})


@pytest.fixture(autouse=True)
def no_list_of_packages(monkeypatch):
    """lm-eval asks pip for it after every block of documents: most of what a run of the tiny model takes."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda *_: None)


@pytest.fixture
def canned(monkeypatch):
    """A function that lets the model say reply(prompt, row). `row` has the scheme and seed of the batch row.

    Answers that are shorter than what may be generated end by themselves.
    """

    def install(reply):
        def generate(lm, context, max_length, stop, **_):
            prompts = [lm.tok_decode(ids) for ids in context.tolist()]
            said = [lm.tokenizer(reply(p, row))["input_ids"] for p, row in zip(prompts, lm.session.rows, strict=True)]
            room = max_length - context.shape[1]
            return torch.cat(
                [context, torch.tensor([ids + [lm.eot_token_id] * (room - len(ids)) for ids in said])], dim=1
            )

        monkeypatch.setattr(HFLM, "_model_generate", generate)

    return install


def rows(folder, task=TASK):
    return [
        json.loads(line, parse_constant=pytest.fail)
        for line in (folder / f"samples_{task}.jsonl").read_text().splitlines()
    ]


def test_every_arm_answers_every_document(tiny, tmp_path) -> None:
    folders = run_accuracy(AccuracyOptions(**SHORT), tmp_path / "out", loaded=tiny)
    assert list(folders) == ["reference", "control", "nvfp4@5"]
    reference, control, scheme = (rows(folder) for folder in folders.values())
    for arm in (reference, control, scheme):
        assert [row["doc_id"] for row in arm] == list(range(5))
        for row in arm:
            assert row["tokens"] == 12
            assert row["stop"] == "length"
            assert row["raw"]
            assert row["extracted"] in (0, 1)
            assert isinstance(row["looped"], bool)
    assert [row["raw"] for row in reference] == [row["raw"] for row in control]  # another batch, the same answers
    assert [row["prompt_hash"] for row in reference] == [row["prompt_hash"] for row in scheme]


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_the_same(tiny, tmp_path) -> None:
    options = AccuracyOptions(**SHORT)
    whole = run_accuracy(options, tmp_path / "whole", loaded=tiny)

    def kill(line):
        if line.startswith("nvfp4@5"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_accuracy(options, tmp_path / "cut", loaded=tiny, say=kill)
    assert len(rows(tmp_path / "cut" / "nvfp4@5")) == 2  # one batch
    resumed = run_accuracy(options, tmp_path / "cut", resume=True, loaded=tiny)
    for name in whole:
        assert (whole[name] / f"samples_{TASK}.jsonl").read_bytes() == (
            resumed[name] / f"samples_{TASK}.jsonl"
        ).read_bytes()


def test_answers_of_other_options_are_not_mixed_in(tiny, tmp_path) -> None:
    run_accuracy(AccuracyOptions(**{**SHORT, "limit": 2}), tmp_path / "out", loaded=tiny)
    run_accuracy(
        AccuracyOptions(**{**SHORT, "limit": 3}), tmp_path / "out", resume=True, loaded=tiny
    )  # more of the same
    assert len(rows(tmp_path / "out" / "nvfp4@5")) == 3
    with pytest.raises(UsageError, match="holds answers of other options"):
        run_accuracy(AccuracyOptions(**{**SHORT, "seed": 1}), tmp_path / "out", resume=True, loaded=tiny)


@pytest.mark.slow
def test_no_answer_is_shared(tiny, tmp_path, canned) -> None:
    """E5: fp32, nvfp4 with two seeds, and to nearest. Every arm gives every answer itself, also after a kill."""
    asked, kill_at = Counter(), None

    def reply(prompt, row):
        asked[str(row.scheme), row.seed] += 1
        if asked["nvfp4@5", 1] == kill_at:
            raise KeyboardInterrupt
        return f"{row.scheme} {row.seed} {row.document}"

    def run(seed, folder, **more):
        options = {
            **SHORT,
            "schemes": ["nvfp4@5", "nvfp4-rn@5"],
            "limit": 6,
            "batch_size": 1,
            "max_gen_toks": 40,
            "seed": seed,
        }
        return run_accuracy(AccuracyOptions(**options), tmp_path / folder, loaded=tiny, **more)

    canned(reply)
    whole = {seed: run(seed, f"seed-{seed}") for seed in (1, 2)}
    assert asked == {
        (scheme, seed): n for seed in (1, 2) for scheme, n in (("fp32", 12), ("nvfp4@5", 6), ("nvfp4-rn@5", 6))
    }
    for seed, folders in whole.items():
        for name, folder in folders.items():
            said = {row["raw"] for row in rows(folder)}
            assert len(said) == 6
            assert {text.rpartition(" ")[0] for text in said} == {
                f"{'fp32' if name in ('reference', 'control') else name} {seed}"
            }

    asked.clear()
    kill_at = 4  # three answers were given and written
    with pytest.raises(KeyboardInterrupt):
        run(1, "cut")
    assert len(rows(tmp_path / "cut" / "nvfp4@5")) == 3
    kill_at = None
    for name, folder in run(1, "cut", resume=True).items():
        assert (folder / f"samples_{TASK}.jsonl").read_bytes() == (
            whole[1][name] / f"samples_{TASK}.jsonl"
        ).read_bytes()
    assert asked == {("fp32", 1): 12, ("nvfp4@5", 1): 4 + 3, ("nvfp4-rn@5", 1): 6}


def test_a_folder_is_not_gone_on_with_by_another_run(tiny, tmp_path, canned) -> None:
    """E5: the folder name holds neither seed, generation settings, examples, model, revision nor documents."""
    canned(lambda prompt, row: "42")
    data, out = tmp_path / "gsm.jsonl", tmp_path / "out"
    common = {
        "schemes": ["nvfp4@5"],
        "limit": 2,
        "max_gen_toks": 8,
        "tasks": ["gsm8k"],
        "task_data": {"replayssm_gsm8k": str(data)},
    }

    def run(loaded=tiny, question="What is {} + 1?", **change):
        data.write_text(
            "".join(json.dumps({"question": question.format(i), "answer": f"#### {i + 1}"}) + "\n" for i in range(3))
        )
        run_accuracy(AccuracyOptions(**{**common, **change}), out, loaded=loaded, resume=True)

    run()
    before = {path: path.read_bytes() for path in out.rglob("*.*")}
    other = deepcopy(tiny)
    with torch.no_grad():
        other.model.get_output_embeddings().weight.add_(1)
    for change in (
        {"seed": 1},
        {"max_gen_toks": 9},
        {"gen_kwargs": "do_sample=true,temperature=0.6"},
        {"num_fewshot": 1},
        {"revision": "v2"},
        {"dtype": "bfloat16"},
        {"loaded": other},
        {"question": "What is 1 + {}?"},
    ):
        with pytest.raises(UsageError, match="holds answers of other options"):
            run(**change)
        assert {path: path.read_bytes() for path in out.rglob("*.*")} == before, change
    run(limit=3)
    graders = json.loads((out / "reference" / "arm.json").read_text())["code"]
    assert graders == code_digest(replayssm_tasks) != code_digest()


def test_no_reply_and_no_score_breaks_a_log(tiny, tmp_path, canned, monkeypatch) -> None:
    """E7: half a surrogate pair in every reply, and scores of every kind. NaN has a status and no weight."""
    scores = [
        float("nan"),
        np.float32(1),
        Decimal(1),
        Decimal("NaN"),
        np.int64(1),
        np.bool_(True),
    ]  # lm-eval sums up two of one kind
    order: dict[str, int] = {}  # of the documents, as they come

    def grade(document, response):
        return {"exact_match": scores[order.setdefault(document["prompt"], len(order))], "extracted": np.float64(1)}

    decode = HFLM.tok_decode
    monkeypatch.setattr(HFLM, "tok_decode", lambda *args, **options: decode(*args, **options) + "\ud835")
    monkeypatch.setattr(progression, "grade", grade)
    canned(lambda prompt, row: "0.0.1")
    options = {**SHORT, "batch_size": 1}
    run_accuracy(AccuracyOptions(**{**options, "limit": 4}), tmp_path / "out", loaded=tiny)
    # What is read back is written again.
    folders = run_accuracy(AccuracyOptions(**{**options, "limit": 6}), tmp_path / "out", resume=True, loaded=tiny)
    for folder in folders.values():
        found = rows(folder)
        assert [row["exact_match"] for row in found] == [None, 1, 1, None, 1, 1]
        assert [row.get("status") for row in found] == [
            "no score: exact_match" if i in (0, 3) else None for i in range(6)
        ]
        assert all(row["resps"] == [["0.0.1\ud835"]] and row["raw"].endswith("\ud835") for row in found)
    reference, *others = folders.values()
    result = run_quartiles(reference, others, output=tmp_path / "table")
    assert result["reference"]["overall"]["accuracy"] == 1
    assert [arm["no_score"] for arm in result["arms"]] == [["0", "3"]] * 3
    assert sum(b["n"] for b in result["bins"]) == 4


def test_thinking_from_the_reply_to_the_table(tiny, tmp_path, canned) -> None:
    """E1: cut while thinking; a stop string of other tasks inside the thinking part; two end marks; no mark at all."""
    replies = [
        "<think> maybe 12, then 17" + ", or 12, or 17" * 3,
        "<think>a\n\nb</think> 42",
        "1</think> \\boxed{1}</think> 42",
        "42",
    ]
    counts = [len(tiny.tokenizer(reply)["input_ids"]) for reply in replies]
    canned(lambda prompt, row: replies[int(prompt.partition("?")[0].split()[-1])])
    data = tmp_path / "gsm.jsonl"
    data.write_text(
        "".join(json.dumps({"question": f"What is 42 of {i}?", "answer": "#### 42"}) + "\n" for i in range(4))
    )
    options = {
        "tasks": ["gsm8k"],
        "task_data": {"replayssm_gsm8k": str(data)},
        "max_gen_toks": counts[0],
        "schemes": ["nvfp4@5"],
    }
    folders = run_accuracy(AccuracyOptions(**options), tmp_path / "out", loaded=tiny)
    found = rows(folders["reference"], "replayssm_gsm8k")
    assert [row["filtered_resps"] for row in found] == [["[invalid]"], ["42"], ["42"], ["42"]]
    assert [row["stop"] for row in found] == ["length", "eos", "eos", "eos"]
    assert [row["tokens"] for row in found] == counts
    reference, *others = folders.values()
    result = run_quartiles(reference, others, output=tmp_path / "table")
    assert [b["n"] for b in result["bins"]] == [1, 1, 1, 1]
    assert [cell["accuracy"] for cell in result["reference"]["bins"]] == [1, 1, 1, 0]
    assert [(cell["truncated"], cell["not_extracted"]) for cell in result["reference"]["bins"]] == [(0, 0)] * 3 + [
        (1, 1)
    ]
    assert "thinking included" in (tmp_path / "table" / "quartiles.md").read_text()


@pytest.mark.slow
def test_the_control_answers_in_another_batch(tmp_path, monkeypatch) -> None:
    """T3: greedy answers of the testbed in a batch of 4 and one by one; then with rounded states."""
    options = AccuracyOptions(schemes=["nvfp4-rn@5"], limit=4, batch_size=4, max_gen_toks=24)
    arms = [replace(arm, batch_size=1) if arm.name == CONTROL else arm for arm in planned_arms(options)]
    monkeypatch.setattr("replayssm_eval.accuracy.run.planned_arms", lambda options: arms)
    reference, control, scheme = run_accuracy(options, tmp_path / "out", loaded=load("tiny-mamba2")).values()
    answers = [[row["raw"] for row in rows(folder)] for folder in (reference, control, scheme)]
    assert answers[0] == answers[1] != answers[2]
    result = run_quartiles(reference, [scheme, control], output=tmp_path / "table")
    assert [arm["role"] for arm in result["arms"]] == ["reference", "scheme", "control"]
    assert result["control"]["range"] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schemes": ["nvfp4@5", "nvfp4@5"]}, "nvfp4@5 is given twice"),
        ({"schemes": []}, "nothing to do"),
        ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"tasks": ["no_such_task"]}, "unknown task 'no_such_task'"),
        ({"max_length": 12}, "leave no room for a prompt within 12"),
    ],
    ids=str,
)
def test_bad_options_are_refused_before_the_model_is_loaded(change, says, tmp_path, monkeypatch) -> None:
    from replayssm_eval.accuracy import run as accuracy

    monkeypatch.setattr(accuracy, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    with pytest.raises(UsageError, match=says):
        run_accuracy(AccuracyOptions(**{**SHORT, **change}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "model", "tasks", "limit"),
    [
        ([], "tiny-answers", ["progression"], 64),
        (["--limit", "5"], "tiny-answers", ["progression"], 5),
        (["--task", "progression"], "tiny-answers", ["progression"], None),
        (["--model", "some/model"], "some/model", ["gsm8k"], None),
    ],
)
def test_defaults_follow_the_model(arguments, model, tasks, limit, monkeypatch, tmp_path) -> None:
    """A task that only one testbed was trained for is the default of no other model."""
    from replayssm_eval.accuracy import run as accuracy
    from replayssm_eval.cli import main as cli

    def asked(options, output, **more):
        assert (options.model, list(options.tasks), options.limit) == (model, tasks, limit)
        raise KeyboardInterrupt

    monkeypatch.setattr(accuracy, "run_accuracy", asked)
    monkeypatch.setattr(sys, "argv", ["replayssm-eval", "accuracy", *arguments, "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130


def test_the_command_ends_with_the_quartile_table(tiny, tmp_path, monkeypatch, capsys) -> None:
    from replayssm_eval.accuracy import run as accuracy
    from replayssm_eval.cli import main as cli

    monkeypatch.setattr(accuracy, "load", lambda *a, **k: tiny)
    data = tmp_path / "gsm.jsonl"
    data.write_text(
        "".join(json.dumps({"question": f"What is {i} + 1?", "answer": f"So #### {i + 1}"}) + "\n" for i in range(5))
    )
    command = [
        "accuracy",
        "--model",
        "tiny-mamba2",
        "--task",
        "gsm8k",
        "--task-data",
        f"gsm8k={data}",
        "--scheme",
        "nvfp4@5",
    ]
    command += ["--max-gen-toks", "8", "--batch-size", "5", "--output", str(tmp_path / "out"), "--quiet"]
    monkeypatch.setattr(sys, "argv", ["replayssm-eval", *command])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "nvfp4@5 against reference, by the reference's answer length (tokens)" in out
    assert "control against reference" in out
    result = json.loads((tmp_path / "out" / "quartiles-replayssm_gsm8k" / "quartiles.json").read_text())
    assert [arm["role"] for arm in result["arms"]] == ["reference", "control", "scheme"]
    assert result["length_unit"] == "tokens"
    assert sum(b["n"] for b in result["bins"]) == 5
