"""lm-eval with rounded states: answers belong to their prompts, and fp32 is the unpatched backend."""

import json
import subprocess
import sys

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from replayssm_emulation import UsageError

from replayssm_eval.accuracy import backend as lm_backend
from replayssm_eval.accuracy.backend import ReplayLM, document_number
from replayssm_eval.accuracy.stopping import Generation
from replayssm_eval.models.loading import location_of

PROMPTS = [
    "The whale ",
    "Call me Ishmael. Some years ago",
    "It was a dark and stormy night; the rain fell in torrents, and ",
]
COMMON = {"device": "cpu", "dtype": "float32"}


def generate(lm, prompts, tokens=36) -> list[str]:
    arguments = {"until": ["\n\n"], "max_gen_toks": tokens, "do_sample": False}
    return lm.generate_until(
        [Instance("generate_until", {}, (p, arguments), i) for i, p in enumerate(prompts)], disable_tqdm=True
    )


def score(lm, pairs) -> list[float]:
    return [
        value
        for value, _ in lm.loglikelihood(
            [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)], disable_tqdm=True
        )
    ]


PAIRS = [
    (PROMPTS[2], "the sea was black."),
    (PROMPTS[0], "was white."),
    ("", "Loomings. Call me Ishmael. Some years ago never mind how long"),
]


@pytest.fixture(scope="module")
def unpatched():
    """(answers, scores) of lm-eval's own backend, before anything is attached to the model's code."""
    lm = HFLM(location_of("tiny-mamba2"), batch_size=3, use_kernels=False, **COMMON)
    return generate(lm, PROMPTS), score(lm, PAIRS)


@pytest.fixture(scope="module")
def rounded(unpatched):
    lm = ReplayLM("tiny-mamba2", scheme="nvfp4@5", batch_size=3, **COMMON)
    yield lm
    lm.close()


def test_an_answer_belongs_to_its_prompt(rounded) -> None:
    """Alone or in a batch with left padding, first or last: the same text, count of tokens and stop reason."""
    together = generate(rounded, PROMPTS)
    kept = dict(rounded.generations)
    rounded.generations.clear()
    assert generate(rounded, PROMPTS[::-1]) == together[::-1]
    assert [generate(rounded, [p])[0] for p in PROMPTS] == together
    assert rounded.generations == kept
    for record in kept.values():
        assert record.stop in ("eos", "stop", "length")
        assert len(record.ids) == record.tokens <= 36
        assert (record.stop == "length") == (record.tokens == 36)


def test_the_stop_reason_counts_tokens_up_to_the_stop(rounded) -> None:
    tokenizer, eos = rounded.tokenizer, rounded.eot_token_id
    text = tokenizer("A whale.\n\nB")["input_ids"]
    assert rounded.stopping.generation("", text, ["\n\n"]).stop == "stop"
    assert rounded.tok_decode(rounded.stopping.generation("", text, ["\n\n"]).ids).startswith("A whale.")
    assert rounded.stopping.generation("", text, ["\n\n"]).tokens < len(text)
    assert rounded.stopping.generation("", [5, 6, eos, eos], []).tokens == 2
    assert rounded.stopping.generation("", [5, 6, eos, eos], []).stop == "eos"
    assert rounded.stopping.generation("", [5, 6], []).stop == "length"


def test_thinking_that_the_prompt_opened_is_not_forgotten(rounded) -> None:
    cut, ended = rounded.tokenizer(" so 12 and then")["input_ids"], rounded.tokenizer(" so 12</think> 42")["input_ids"]
    prompt = "How many?<think>"

    def with_thinking(context, answer):
        return rounded.stopping.with_thinking(context, answer, rounded.generation_for(context))

    key = document_number(rounded.tok_batch_encode([prompt])[0][0].tolist())
    rounded.generations[key] = Generation(tuple(cut), "length", " so 12 and then")
    assert with_thinking(prompt, " so 12 and then") == "<think> so 12 and then"
    assert with_thinking("How many?", " so 12 and then") == " so 12 and then"
    rounded.think_end_token = "</think>"
    try:
        assert with_thinking(prompt, " so 12 and then") == "<think> so 12 and then"
        rounded.generations[key] = Generation(tuple(ended), "eos", " so 12</think> 42")
        assert with_thinking(prompt, "42") == "42"  # lm-eval cut the thinking off
    finally:
        rounded.think_end_token = None


def test_likelihoods_move_with_the_state_and_not_with_the_batch(rounded, unpatched) -> None:
    together, exact = score(rounded, PAIRS), unpatched[1]
    assert [score(rounded, [pair])[0] for pair in PAIRS] == pytest.approx(together, abs=1e-3)
    assert together != pytest.approx(exact, abs=1e-3)
    assert together == pytest.approx(exact, abs=1.0)


def test_fp32_is_the_unpatched_backend(rounded, unpatched) -> None:
    rounded.close()  # one scheme at a time
    lm = ReplayLM("tiny-mamba2", scheme="fp32", batch_size=3, **COMMON)
    try:
        assert generate(lm, PROMPTS) == unpatched[0]
        assert score(lm, PAIRS) == pytest.approx(unpatched[1], abs=1e-3)
    finally:
        lm.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"scheme": "nvfp5@16"}, "nvfp5"),
        ({"batch_size": "auto"}, "needs a batch size"),
        ({"pretrained": "no/such-model"}, "no/such-model"),
        ({"parallelize": True}, "does not take parallelize"),
    ],
    ids=str,
)
def test_bad_arguments_are_one_line(arguments, says) -> None:
    with pytest.raises(UsageError, match=says):
        ReplayLM(**{"pretrained": "tiny-mamba2", **COMMON, **arguments})


@pytest.mark.slow
def test_lm_evals_own_command_line(tmp_path) -> None:
    documents = [{"q": p, "a": "x"} for p in PROMPTS]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (tmp_path / "toy.yaml").write_text(
        f"task: replayssm_toy\ndataset_path: json\ndataset_kwargs:\n"
        f"  data_files:\n    test: {tmp_path}/data.jsonl\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "generation_kwargs:\n  until: [\"\\n\\n\"]\n  max_gen_toks: 8\n  do_sample: false\n"
        "metric_list:\n  - metric: exact_match\n    aggregation: mean\n    higher_is_better: true\n"
    )  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "replayssm_eval.lm_eval",
        "run",
        "--model",
        "replayssm",
        "--tasks",
        "replayssm_toy",
    ]
    command += [
        "--model_args",
        "pretrained=tiny-mamba2,scheme=nvfp4/fp16@16,dtype=float32",
        "--device",
        "cpu",
        "--batch_size",
        "3",
    ]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "exact_match" in done.stdout
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    assert len(samples.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("prompt", "reply", "answer", "stop", "options"),
    [
        ("Q", "<think>a\n\nb</think> 42\n\nmore", "<think>a\n\nb</think> 42", "stop", {}),
        ("Q", "<think>a\n\nb</think> 42\n\nmore", "42", "stop", {"think_end_token": "</think>"}),
        ("Q <think>", "a\n\nb</think> 42", "<think>a\n\nb</think> 42", "length", {}),
        ("Q <think>", "a\n\nb", "<think>a\n\nb", "length", {}),
        ("Q", "a\n\nb", "a", "stop", {}),
    ],
    ids=["marks", "told-mark", "opened-by-the-prompt", "cut-while-thinking", "no-thinking"],
)
def test_stop_strings_count_behind_the_thinking_part(
    rounded, monkeypatch, prompt, reply, answer, stop, options
) -> None:
    """E1: a generic stop string inside the thinking part neither ends the generation nor cuts the answer."""
    ids = torch.tensor(rounded.tok_encode(reply))

    def say(
        model, input_ids, logits_processor, stopping_criteria, generation_config, ended=None, session=None, **kwargs
    ):
        for n in range(len(ids)):
            out = torch.cat([input_ids, ids[None, : n + 1]], dim=1)
            if ended(ids[None, : n + 1], torch.tensor([0])).all():
                break
        return out

    monkeypatch.setattr(lm_backend, "decode", say)
    monkeypatch.setattr(rounded, "think_end_token", options.get("think_end_token"))
    rounded.generations.clear()
    assert generate(rounded, [prompt]) == [answer]
    (made,) = rounded.generations.values()
    assert made.stop == stop
    if stop == "stop":
        assert made.tokens < len(ids)


def test_a_special_token_stops_too(rounded, monkeypatch) -> None:
    """It is not in the text, from which special tokens are left out; what follows it is no part of the answer."""
    ids = rounded.tok_encode(" white as snow and")
    mark = rounded.tokenizer.convert_ids_to_tokens(ids[2])
    monkeypatch.setattr(type(rounded.tokenizer), "all_special_tokens", property(lambda self: [mark]))
    made = rounded.stopping.generation("The whale was", ids, [mark])
    assert made.stop == "stop"
    assert made.text == rounded.tok_decode(ids[:2])
    assert rounded.stopping.generation("The whale was", ids[:2], [mark]).stop == "length"
