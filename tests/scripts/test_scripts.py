"""The scripts run as their first lines say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytestmark = pytest.mark.slow


def script(name: str, *args: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPTS / name), *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **environment}
    )


def test_benchmark_runs() -> None:
    done = script("bench_kl.py", "--tokens", "64")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tokens"] == 64
    assert {"load", "replay_scan", "compare_hidden", "write"} <= report["parts"].keys()


@pytest.mark.parametrize(
    ("growth", "options", "code"),
    [(80.0, [], 0), (15.0, ["--delta"], 0), (15.0, [], 1), (2.0, ["--delta"], 1)],
    ids=["good", "good-delta", "too-flat", "too-flat-delta"],
)
def test_testbed_check_accepts_and_refuses(tmp_path, growth, options, code) -> None:
    """Made-up curves: nearest grows by `growth`, stochastic by a third of it from twice the start, separate stays."""
    tokens = 131072
    late = np.arange(tokens) >= 4096
    kl = {
        "control": np.zeros(tokens),
        "nvfp4-rn@16": np.where(late, growth, 1.0) * 1e-3,
        "nvfp4@16": np.where(late, growth / 3, 2.0) * 1e-3,
        "nvfp4/fp16@16": np.full(tokens, 1e-3),
    }
    frames = []
    for name, values in kl.items():
        role = "control" if name == "control" else "scheme"
        columns = {"book": 0, "scheme": "fp32" if role == "control" else name, "role": role, "seed": 0}
        frames.append(pd.DataFrame({**columns, "position": np.arange(tokens), "kl": values.astype(np.float32)}))
    pd.concat(frames).to_parquet(tmp_path / "kl.parquet")
    (tmp_path / "kl.json").write_text(json.dumps({"corpus": {"books": [{"title": "a book"}]}}))
    done = script("check_testbed.py", str(tmp_path), *options)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("FAIL" in done.stdout) == bool(code)


def test_training_script_explains_itself() -> None:
    done = script("train_testbed.py", "--help")
    assert done.returncode == 0
    assert "--pg19" in done.stdout


@pytest.mark.parametrize("model", ["tiny-mamba2", "tiny-gdn"])
def test_scan_accuracy_is_that_of_fp32(model) -> None:
    """Six layers, each within a few hundred roundings (64·2⁻²⁴) of the float64 recurrence."""
    done = script("scan_accuracy.py", "--tokens", "200", "--model", model)
    assert done.returncode == 0, done.stderr
    errors = [float(line.split()[1]) for line in done.stdout.splitlines()[1:]]
    assert len(errors) == 6
    assert max(errors) <= 64 * 2**-24


def test_writes_of_the_delta_rule_shorten_the_life_of_errors() -> None:
    done = script("error_lifetime.py", "--tokens", "600")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[1:]
    assert len(lines) == 2 * 6
    alone, erased = (np.array([[float(n) for n in line.split()[4:]] for line in lines[half::2]]) for half in (0, 1))
    assert (erased <= alone).all()
    assert np.isinf(alone).sum() > np.isinf(erased).sum()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--head", "64x64", "--scheme", "nvfp4/fp16@16", "--scheme", "fp8@1", "--scheme", "mxfp4-sr/int8@16"],
        ["--head", "10x12", "--dtype", "float32", "--scheme", "fp32@20", "--scheme", "fp16@1"],
    ],
    ids=["bf16", "fp32"],
)
def test_kernels_compile_for_a_gpu_that_is_not_here(arguments) -> None:
    """The interpreter accepts what the compiler does not."""
    done = script("compile_kernels.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiled in") == arguments.count("--scheme")


def test_scans_for_the_sanitizer_run_without_it() -> None:
    done = script("sanitize_scans.py", "--device", "cpu", "--backend", "torch", "--tool", "memcheck", PATH="")
    assert "all outputs written" in done.stdout
    assert done.returncode == 1
    assert "not on PATH" in done.stderr


def test_generation_benchmark_compares_answers() -> None:
    done = script(
        "bench_generate.py", "--device", "cpu", "--batch", "2", "--prompt", "5", "--tokens", "6", "--scheme", "nvfp4@2"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["way"] for row in report["rows"]] == ["transformers", "step by step", "replayed"]
    assert report["rows"][-1]["same_tokens"] == 1
    assert report["rows"][-1]["graphs"] == 0, "there is no GPU"


def test_answers_check_refuses_a_model_that_knows_none() -> None:
    done = script(
        "check_answers.py",
        "tiny-mamba2",
        "--documents",
        "8",
        "--longest",
        "60",
        "--scheme",
        "nvfp4@16",
        "--device",
        "cpu",
    )
    assert done.returncode == 1, done.stderr
    assert "NOT accepted" in done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines()[1:3]] == ["0.000", "0.000"]


def test_answers_check_accepts_the_shipped_testbed() -> None:
    done = script("check_answers.py", "tiny-answers", "--documents", "20", "--scheme", "nvfp4@16", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    fp32, coarse = (float(line.split()[1]) for line in done.stdout.splitlines()[1:3])
    assert fp32 > coarse
