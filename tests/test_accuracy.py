"""The accuracy run on a tiny random model: arms apart, every answer with its facts, a kill loses a block and changes nothing."""

import json
import logging

import pytest
import torch
from replayssm_emulation import UsageError
from transformers import AutoTokenizer, NemotronHConfig, NemotronHForCausalLM

from replayssm_eval.accuracy import AccuracyOptions, run_accuracy
from replayssm_eval.models import Loaded, location_of

TASK = "replayssm_progression"
SHORT = {"schemes": ["nvfp4@5"], "limit": 5, "batch_size": 2, "max_gen_toks": 12, "metadata": {"progression_lengths": [22, 60]}}


@pytest.fixture(scope="module")
def tiny():
    """Reads and writes the testbed's tokens, knows nothing, costs nothing."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tokenizer = AutoTokenizer.from_pretrained(location_of("tiny-mamba2"))
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=len(tokenizer), hidden_size=16, hybrid_override_pattern="MM*", intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, mamba_num_heads=2, mamba_head_dim=10, ssm_state_size=16, n_groups=1, chunk_size=32,
    )  # fmt: skip
    model = NemotronHForCausalLM(config).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    return Loaded(model, tokenizer, {})


def rows(folder):
    return [json.loads(line) for line in (folder / f"samples_{TASK}.jsonl").read_text().splitlines()]


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


def test_a_killed_run_goes_on_and_ends_the_same(tiny, tmp_path) -> None:
    options = AccuracyOptions(**SHORT)
    whole = run_accuracy(options, tmp_path / "whole", loaded=tiny)

    def kill(line):
        if line.startswith("nvfp4@5"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_accuracy(options, tmp_path / "cut", loaded=tiny, say=kill)
    assert len(rows(tmp_path / "cut" / "nvfp4@5")) == 4  # one block of two batches
    resumed = run_accuracy(options, tmp_path / "cut", resume=True, loaded=tiny)
    for name in whole:
        assert (whole[name] / f"samples_{TASK}.jsonl").read_bytes() == (resumed[name] / f"samples_{TASK}.jsonl").read_bytes()


def test_answers_of_other_options_are_not_mixed_in(tiny, tmp_path) -> None:
    run_accuracy(AccuracyOptions(**{**SHORT, "limit": 2}), tmp_path / "out", loaded=tiny)
    run_accuracy(AccuracyOptions(**{**SHORT, "limit": 3}), tmp_path / "out", resume=True, loaded=tiny)  # more of the same
    assert len(rows(tmp_path / "out" / "nvfp4@5")) == 3
    with pytest.raises(UsageError, match="holds answers of other options"):
        run_accuracy(AccuracyOptions(**{**SHORT, "seed": 1}), tmp_path / "out", resume=True, loaded=tiny)


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
    from replayssm_eval import accuracy

    monkeypatch.setattr(accuracy, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    with pytest.raises(UsageError, match=says):
        run_accuracy(AccuracyOptions(**{**SHORT, **change}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_ends_with_the_quartile_table(tiny, tmp_path, monkeypatch, capsys) -> None:
    import sys

    from replayssm_eval import accuracy, cli

    monkeypatch.setattr(accuracy, "load", lambda *a, **k: tiny)
    data = tmp_path / "gsm.jsonl"
    data.write_text("".join(json.dumps({"question": f"What is {i} + 1?", "answer": f"So #### {i + 1}"}) + "\n" for i in range(5)))
    command = ["accuracy", "--model", "tiny-mamba2", "--task", "gsm8k", "--task-data", f"gsm8k={data}", "--scheme", "nvfp4@5"]
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
