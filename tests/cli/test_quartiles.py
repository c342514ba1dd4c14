"""`replayssm-eval quartiles` as a user runs it: folders of sample logs in, a folder of results out."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pyarrow.parquet
import pytest

from replayssm_eval.quartiles.figure import arm_look

QUESTIONS = 200


def log(folder, lost=0, flips=0, seed=0, stamp="2026-11-30T08-00-00.5", **more):
    """Samples of 200 questions in lm-eval's folders; the longest `lost` of the right answers are wrong here."""
    right = np.random.default_rng(0).random(QUESTIONS) < 0.9
    right[np.random.default_rng(seed).integers(0, 150, flips)] ^= True
    right[QUESTIONS - lost :] = False
    path = folder / "model" / f"samples_gsm8k_{stamp}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for i, good in enumerate(right):
            hashes = {
                f"{what}_hash": hashlib.sha256(f"{what} {i}".encode()).hexdigest()
                for what in ("doc", "prompt", "target")
            }
            row = {
                "doc_id": i,
                "resps": [["half \ud835 of a pair"]],
                "filtered_resps": ["4"],
                "filter": "strict-match",
                **hashes,
            }
            row |= {"exact_match": float(good), "tokens": 20 + 5 * i, "stop": "eos", "looped": False, **more}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """fp32, a control of it, and a scheme that loses its longest answers; named as a folder can be."""
    folder = tmp_path_factory.mktemp("runs")
    log(folder / "fp32")
    log(folder / "fp32-again", flips=3, seed=1)
    log(folder / "<b>nvfp4|$x$</b>@16".replace("/", "\u2215"), lost=25, flips=3, seed=2)
    return folder


def arms(runs):
    return [runs / "fp32", next(p for p in runs.iterdir() if "nvfp4" in p.name), "--control", runs / "fp32-again"]


def test_a_planted_loss_end_to_end(main, runs, tmp_path) -> None:
    out = tmp_path / "out"
    code, text, err = main("quartiles", *arms(runs), "--output", out)
    assert (code, err) == (0, "")
    assert sorted(p.name for p in out.iterdir()) == [
        f"quartiles.{end}" for end in ("html", "json", "md", "parquet", "png", "svg")
    ]
    result = json.loads((out / "quartiles.json").read_text())
    assert result["schema"] == "replayssm-eval/quartiles@1"
    assert (result["task"], result["metric"], result["filter"], result["length_unit"]) == (
        "gsm8k",
        "exact_match",
        "strict-match",
        "tokens",
    )
    assert [(b["lo"], b["hi"], b["n"]) for b in result["bins"]] == [
        (20, 265, 50),
        (270, 515, 50),
        (520, 765, 50),
        (770, 1015, 50),
    ]
    scheme, control = result["variants"]
    assert (scheme["role"], control["role"], control["name"]) == ("scheme", "control", "fp32-again")
    assert [c["verdict"] for c in scheme["bins"]][3] == "loss"
    assert "loss" not in [c["verdict"] for c in (*scheme["bins"][:3], *control["bins"])]
    assert scheme["trend"]["verdict"] == "falls with length"
    assert result["provenance"]["command"].startswith("replayssm-eval quartiles")
    for column in (
        "length",
        "both",
        "won",
        "lost",
        "Holm p",
        "cut off",
        "no answer",
        "looped",
        "detectable",
        "verdict",
    ):
        assert column in text.split("\n")[1]
    assert "loss at 770–1,015 tokens" in text
    assert f"{out}/quartiles.png" in text

    page = (out / "quartiles.html").read_text()
    assert "&lt;b&gt;nvfp4" in page
    assert "<b>nvfp4" not in page
    assert page.count("<svg") == 1
    assert (out / "quartiles.svg").read_text().count("$x$") == 1  # a name, not mathematics
    assert "nvfp4\\|$x$" in (out / "quartiles.md").read_text()
    table = pyarrow.parquet.read_table(out / "quartiles.parquet").to_pylist()
    assert len(table) == 3 * QUESTIONS
    assert {row["bin"] for row in table} == {0, 1, 2, 3}
    mine = [row["score"] for row in table if row["role"] == "scheme" and row["bin"] == 3]
    assert np.mean(mine) == pytest.approx(scheme["bins"][3]["accuracy"])


def test_json_is_what_is_written_and_a_second_run_is_refused(main, runs, tmp_path) -> None:
    args = ("quartiles", runs / "fp32", runs / "fp32-again", "--bins", 2, "--output", tmp_path / "out", "--json")
    code, text, err = main(*args)
    assert code == 0
    assert text == (tmp_path / "out" / "quartiles.json").read_text()
    assert len(json.loads(text)["bins"]) == 2
    assert err.startswith("replayssm-eval: No control:")
    code, text, err = main(*args)
    assert (code, text) == (2, "")
    assert err == f"replayssm-eval: {tmp_path / 'out'} already holds a run: pass --overwrite or another --output\n"
    config = tmp_path / "run.yaml"
    config.write_text("name: [a, b]\nfilter: strict-match\noverwrite: true\ncontrol: b\n")
    code, text, err = main(*args, "--config", config)
    assert (code, err) == (0, "")
    assert [(arm["name"], arm["role"]) for arm in json.loads(text)["arms"]] == [("a", "reference"), ("b", "control")]


def test_rows_of_every_filter_are_counted(main, tmp_path) -> None:
    """E3: with several filters one must be chosen, and both the refusal and the report say how many rows each has."""
    for name in ("fp32", "control"):
        path = log(tmp_path / name)
        path.write_text(path.read_text() + path.read_text().replace("strict-match", "flexible-extract"))
    args = ("quartiles", tmp_path / "fp32", tmp_path / "control", "--output", tmp_path / "out")
    code, text, err = main(*args)
    assert (code, text) == (2, "")
    assert "fp32: strict-match (200 rows), flexible-extract (200 rows)" in err
    code, text, err = main(*args, "--filter", "strict-match")
    assert code == 0
    for said in (err, (tmp_path / "out" / "quartiles.md").read_text()):
        assert "control: rows per filter: 200 strict-match, 200 flexible-extract." in said


def test_three_questions(main, tmp_path) -> None:
    for name in ("a", "control"):
        path = log(tmp_path / name)
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    log(tmp_path / "a", stamp="2026-11-29T08-00-00.5", exact_match=0.0)  # older, and not what is read
    code, text, err = main("quartiles", tmp_path / "a", tmp_path / "control", "--output", tmp_path / "out")
    assert code == 0
    assert "3 questions with a known length: too few for bins" in err
    assert "the newest of 2 files of gsm8k" in err
    assert "100.0 [43.9, 100.0]" in text
    assert json.loads((tmp_path / "out" / "quartiles.json").read_text())["bins"] == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["fp32"], "nothing to compare"),
        (["fp32", "nowhere"], "no such file or folder"),
        (
            ["fp32", "fp32-again", "--control", "nobody"],
            "--control nobody: neither the name of a variant (fp32-again) nor a file",
        ),
        (["fp32", "fp32"], "fp32 is given twice"),
        (["fp32", "--control", "fp32"], "fp32 is given twice"),
        (["fp32", "fp32/model"], "a log compared with itself"),
        (["fp32", "fp32-again", "--name", "x"], "--name is given 1 times for 2 arms"),
        (["fp32", "fp32-again", "--name", "x", "--name", "x"], "two arms are called 'x'"),
        (["fp32", "fp32-again", "--filter", "exact"], "--filter exact: fp32 has no such rows"),
        (["fp32", "fp32-again", "--metric", "acc"], "line 1: no metric acc; it has exact_match"),
        (["fp32", "fp32-again", "--task", "math"], "no task math; it has gsm8k"),
        (["fp32", "fp32-again", "--bins", "0"], "--bins 0: use 1 to 100"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_exit_2_and_one_line(main, runs, tmp_path, monkeypatch, args, says) -> None:
    monkeypatch.chdir(runs)
    code, out, err = main("quartiles", *args, "--output", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("replayssm-eval: ")
    assert says in err
    assert not (tmp_path / "out").exists()


def test_arms_of_equal_folder_names_are_told_apart(main, tmp_path) -> None:
    log(tmp_path / "fp32" / "out")
    log(tmp_path / "control" / "out")
    code, text, _ = main(
        "quartiles", tmp_path / "fp32" / "out", tmp_path / "control" / "out", "--output", tmp_path / "q", "--json"
    )
    assert code == 0
    assert [(arm["name"], arm["role"]) for arm in json.loads(text)["arms"]] == [
        ("fp32/out", "reference"),
        ("control/out", "control"),
    ]


def test_a_format_keeps_its_colour() -> None:
    assert arm_look("nvfp4@16", "scheme", 3)["color"] == arm_look("vllm nvfp4 run", "scheme", 0)["color"] == "#D55E00"
    assert arm_look("mine", "scheme", 0)["color"] != arm_look("yours", "scheme", 1)["color"]
    assert arm_look("nvfp4@16", "control", 0)["linestyle"] == ":"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from replayssm_eval.cli.main import app; from typer.testing import CliRunner; "
        "r = CliRunner().invoke(app, ['quartiles', '--help']); "
        "assert r.exit_code == 0 and 'REFERENCE' in r.output, r.output; "
        "assert not {'torch', 'scipy', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
