"""The command line as a user types it: output on stdout, one line per failure on stderr, exit codes."""

import json
import subprocess
import sys

import pytest
from replayssm_tasks import hub


def run(*args, cwd=None):
    """(exit code, stdout, stderr) of the command in its own process."""
    done = subprocess.run(
        [sys.executable, "-m", "replayssm_eval", *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from replayssm_eval.cli.main import app; from typer.testing import CliRunner; "
        "r = CliRunner().invoke(app, ['kl', '--help']); "
        "assert r.exit_code == 0 and 'Example' in r.output, r.output; "
        "assert not {'torch', 'transformers', 'numpy', 'scipy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("command", ["formats", "schemes", "models"])
def test_listings(main, command) -> None:
    code, text, _ = main(command)
    assert code == 0
    code, raw, _ = main(command, "--json")
    assert code == 0
    entries = json.loads(raw)
    first = next(iter(entries[0].values()))
    assert first in text
    names = [next(iter(e.values())) for e in entries]
    expected = {"formats": "nvfp4", "schemes": "nvfp4/fp16@16", "models": "tiny-mamba2"}[command]
    assert expected in names


def test_bench_prints_a_table_or_json(main) -> None:
    args = (
        "bench",
        "--shape",
        "2x16x32",
        "--tokens",
        16,
        "--rows",
        1,
        "--repeats",
        1,
        "--scheme",
        "nvfp4@16",
        "--device",
        "cpu",
        "--quiet",
    )
    code, text, _ = main(*args)
    assert code == 0
    assert "scan nvfp4@16" in text
    assert "transformers mamba2_chunk_scan" in text
    code, raw, _ = main(*args, "--json")
    assert code == 0
    assert json.loads(raw)["provenance"]["command"].startswith("replayssm-eval bench")
    code, _, err = main("bench", "--scheme", "nvfp5@16")
    assert code == 2
    assert "nvfp5" in err


@pytest.mark.slow
def test_kl_json_is_what_is_written(tmp_path) -> None:
    args = ["kl", "--scheme", "nvfp4@16", "--tokens", "64", "--output", str(tmp_path / "out"), "--json"]
    code, out, err = run(*args)
    assert code == 0, err
    assert out == (tmp_path / "out" / "kl.json").read_text()
    assert json.loads(out)["control"]["kl_max"] == 0.0
    assert "moby-dick: 64/64 tokens" in err
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert (
        err
        == f"replayssm-eval: {tmp_path / 'out'} already holds a run: pass --overwrite, --resume or another --output\n"
    )


@pytest.mark.slow
def test_kl_prints_a_table_and_where_the_figure_is(main, tmp_path) -> None:
    code, out, _ = main("kl", "--scheme", "nvfp4@16", "--tokens", 64, "--output", tmp_path / "out", "--quiet")
    assert code == 0
    assert "nvfp4@16" in out
    assert "control" in out
    assert f"{tmp_path}/out/kl.png" in out.replace("\n", "")


def test_config_file_sets_defaults_and_flags_win(main, tmp_path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"scheme: [nvfp4@16, fp8@16]\ntokens: 1000\nchunk_size: 32\nseed: 3\noutput: {tmp_path / 'out'}\n"
    )
    code, out, _ = main("kl", "--config", config, "--tokens", 64, "--json", "--quiet")
    assert code == 0
    result = json.loads(out)
    assert (result["tokens"], result["options"]["chunk_size"]) == (64, 32)
    assert [(r["scheme"], r["seed"]) for r in result["rows"][2:]] == [("nvfp4@16", 3), ("fp8@16", 3)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("tokens: true\n", "not a value of this option"),
        ("model: [x]\n", "not a value"),
        ("quiet: 3\n", "not a value"),
        ("colour: red\n", "unknown option 'colour'"),
        ("- a\n", "not a mapping"),
        ("a: [\n", "--config"),
        ("tokens: many\n", "--tokens"),
    ],
)
def test_bad_config_files(main, tmp_path, content, says) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    code, out, err = main("kl", "--config", path)
    assert (code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--scheme", "nvfp5@16"], "unknown format 'nvfp5'"),
        (["--scheme", "nvfp4@0"], "L must be at least 1"),
        (["--scheme", "nvfp4@16+color=red"], "unknown option 'color=red'"),
        (["--tokens", "many"], "--tokens"),
        (["--no-such-option"], "no-such-option"),
        (["--corpus", "nowhere.txt"], "no such file"),
        (["--tokens", "99999999"], "is more than the book has"),
        (["--dtype", "int3"], "--dtype int3"),
        (["--model", "no/such-model"], "tiny-mamba2"),
        (["--model", "nemotron-3-super"], "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"),
        (["--corpus", "pg19"], "emozilla/pg19"),
        (["--device", "nonsense"], "--device nonsense cannot be used"),
        (["--resume", "--output", "/proc/nowhere/out"], "cannot be written to"),
        (["--books", "²"], "no book"),
        (["--seed", "99999999999999999999999"], "2^64"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else "",
)
def test_bad_usage_is_exit_2_and_one_line(main, tmp_path, monkeypatch, args, says) -> None:
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)
    code, out, err = main("kl", "--quiet", "--output", tmp_path / "out", *args)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err
    if err.startswith("replayssm-eval:"):  # ours; the parser's own messages come with a usage line
        assert err.count("\n") == 1
    else:
        assert args[0] in ("--no-such-option",) or args[1] == "many"
    assert not (tmp_path / "out").exists()


def test_a_mamba_1_folder_and_a_model_without_state_are_refused(main, tmp_path) -> None:
    from tests.helpers.models import mamba1

    mamba1().config.save_pretrained(tmp_path / "mamba1")
    code, _, err = main("kl", "--model", tmp_path / "mamba1")
    assert code == 2
    assert "Mamba-1" in err
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text('{"model_type": "gpt2"}')
    code, _, err = main("kl", "--model", tmp_path / "gpt")
    assert code == 2
    assert "'gpt2' has no recurrent state layers" in err


def test_incomplete_weights_are_refused(main, tmp_path) -> None:
    """A checkpoint that lacks a weight would run with a made-up one."""
    import shutil

    from safetensors.torch import load_file, save_file

    from replayssm_eval.models.loading import _ASSETS

    shutil.copytree(_ASSETS / "tiny-mamba2", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights[next(name for name in weights if name.endswith("A_log"))]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    code, _, err = main("kl", "--model", tmp_path / "model", "--tokens", 64, "--quiet")
    assert code == 2
    assert "missing_keys" in err
    assert "A_log" in err


def test_a_failed_run_is_exit_1(main, tmp_path, monkeypatch) -> None:
    import replayssm_kernels.torch_backend.groups as scan

    monkeypatch.setattr(scan, "quantize_with_noise", lambda x, *_: x.clone())
    code, _, err = main("kl", "--scheme", "nvfp4@16", "--tokens", 64, "--output", tmp_path / "out", "--quiet")
    assert code == 1
    assert "the emulation did not run" in err
    assert "Traceback" not in err


def test_interrupting_is_exit_130(main, tmp_path, monkeypatch) -> None:
    import replayssm_eval.kl.reading as reading

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(reading, "hidden_states", interrupted)
    code, _, err = main("kl", "--tokens", 64, "--output", tmp_path / "out", "--quiet")
    assert code == 130
    assert "interrupted" in err
    assert not (tmp_path / "out").exists()
