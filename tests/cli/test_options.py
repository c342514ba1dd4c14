"""Flags follow from the fields of the options; results keep the order of their keys."""

import json
from dataclasses import asdict, dataclass

import pytest
import typer
from typer.testing import CliRunner

from replayssm_eval.accuracy.options import AccuracyOptions
from replayssm_eval.cli.options import takes_options
from replayssm_eval.kl.options import KlOptions
from replayssm_eval.models.options import ModelOptions
from replayssm_eval.results.options import Options, option

KL_KEYS = [
    "model",
    "schemes",
    "corpus",
    "books",
    "split",
    "text_key",
    "tokens",
    "prompt_tokens",
    "chunk_size",
    "seeds",
    "dtype",
    "device",
    "device_map",
    "revision",
    "trust_remote_code",
    "follow_hf_clamp",
    "backend",
    "engine",
    "random_weights",
]
ACCURACY_KEYS = [
    "model",
    "schemes",
    "tasks",
    "limit",
    "batch_size",
    "seed",
    "task_data",
    "max_gen_toks",
    "max_length",
    "gen_kwargs",
    "apply_chat_template",
    "num_fewshot",
    "include_path",
    "think_end_token",
    "metadata",
    "dtype",
    "device",
    "revision",
    "trust_remote_code",
    "backend",
]


@pytest.mark.parametrize(("kind", "keys"), [(KlOptions, KL_KEYS), (AccuracyOptions, ACCURACY_KEYS)])
def test_results_keep_their_keys_and_order(kind, keys) -> None:
    assert list(kind().to_json()) == keys
    assert kind().to_json() == asdict(kind())


def test_kl_json_keeps_the_order(main, tmp_path) -> None:
    code, out, _ = main("kl", "--tokens", 48, "--scheme", "fp8@16", "--output", tmp_path / "out", "--json", "--quiet")
    assert code == 0
    assert list(json.loads(out)["options"]) == KL_KEYS


@dataclass(frozen=True)
class Some(Options):
    LAST = ("first",)

    first: str = option("a", "Comes last.")
    items: tuple[int, ...] = option((1, 2), "Several.", "--item", "--items", item=int)
    switch: bool = option(False, "On or off.")
    hidden: int = 5


@pytest.fixture
def invoke():
    app = typer.Typer(context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
    seen = []

    @app.command()
    @takes_options(Some)
    def command(options: Some, more: int = 0) -> None:
        """What it does."""
        seen.append((options, more))

    def call(*args):
        result = CliRunner().invoke(app, args)
        return result.exit_code, result.output, seen

    return call


def test_fields_become_flags(invoke) -> None:
    code, _, seen = invoke("--first", "b", "--item", "3", "--items", "4", "--switch", "--more", "7")
    assert code == 0
    assert seen == [(Some(first="b", items=[3, 4], switch=True), 7)]


def test_what_is_not_given_keeps_the_default_of_its_field(invoke) -> None:
    assert invoke()[2] == [(Some(), 0)]


def test_help_shows_fields_in_order_and_no_more(invoke) -> None:
    _, text, _ = invoke("--help")
    assert "What it does." in text
    assert text.index("--item") < text.index("--switch") < text.index("--first") < text.index("--more")
    assert "hidden" not in text
    assert "no-switch" not in text


def test_load_takes_the_part_of_a_commands_options_that_concerns_the_model() -> None:
    options = KlOptions(model="x", device_map="auto", tokens=5, random_weights=True)
    assert ModelOptions.part(options) == ModelOptions(model="x", device_map="auto", random_weights=True)
    assert ModelOptions.part(AccuracyOptions(revision="v2")) == ModelOptions(model="tiny-answers", revision="v2")
