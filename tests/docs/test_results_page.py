"""docs/results.md documents every key of every JSON file and every column of every Parquet file that a run writes."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"
REPORTS = {
    "kl.json": ["tiny-mamba2/moby-dick.json", "delta-rule/kda-moby-dick.json", "performance/qwen3.5-4b.json"],
    "quartiles.json": ["tiny-answers/quartiles.json"],
    "bench JSON": ["performance/bench.json"],
}


def section(name: str) -> str:
    """The text between one heading of the page and the next."""
    return re.split(r"^## ", PAGE.read_text(encoding="utf-8").split(f"\n## {name}\n")[1], flags=re.M)[0]


def expanded(path: str) -> Iterator[str]:
    """`a.{b,c}` -> `a.b`, `a.c`."""
    parts = re.split(r"\{([^}]*)\}", path)
    yield from map("".join, itertools.product(*([p] if i % 2 == 0 else p.split(",") for i, p in enumerate(parts))))


def names(name: str) -> list[str]:
    """What stands in backquotes in the first column of the section's tables."""
    cells = re.findall(r"^\| (`.*?) \|", section(name), flags=re.M)
    return [found for cell in cells for found in re.findall(r"`([^`]+)`", cell)]


def documented(name: str) -> list[re.Pattern[str]]:
    """One pattern per path of the section."""
    return [re.compile(re.escape(path).replace(r"\*", "[^\x00]+")) for p in names(name) for path in expanded(p)]


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Paths of everything that is neither a mapping nor a list; an empty mapping or list has none."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, f"{path}[]")
    else:
        yield path


def missing(name: str, value: dict[str, Any]) -> list[str]:
    """Paths of `value` that the section does not document. A null may stand for an object or a list."""
    known = documented(name)
    origin = documented("provenance")
    out = []
    for path in dict.fromkeys(leaves(value)):
        inside = path.removeprefix("provenance.") if path.startswith("provenance.") else None
        if inside is not None and any(p.fullmatch(inside) for p in origin):
            continue
        if any(
            p.fullmatch(path) or p.pattern.startswith((re.escape(path + "."), re.escape(path + "[]"))) for p in known
        ):
            continue
        out.append(path)
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run of `kl`, and one of `accuracy` with its comparison."""
    from replayssm_eval import run_kl

    folder = tmp_path_factory.mktemp("runs")
    run_kl(schemes=["nvfp4/fp16@16"], tokens=96, output=folder / "kl")
    line = "accuracy --scheme nvfp4@16 --limit 4 --max-gen-toks 40 --max-length 256 --quiet --output"
    call = [sys.executable, "-m", "replayssm_eval", *line.split(), str(folder / "acc")]
    done = subprocess.run(call, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_kl(runs: Path) -> None:
    assert missing("kl.json", read(runs / "kl" / "kl.json")) == []
    assert pyarrow.parquet.read_schema(runs / "kl" / "kl.parquet").names == names("kl.parquet")


def test_quartiles(runs: Path) -> None:
    folder = runs / "acc" / "quartiles-replayssm_progression"
    assert missing("quartiles.json", read(folder / "quartiles.json")) == []
    assert pyarrow.parquet.read_schema(folder / "quartiles.parquet").names == names("quartiles.parquet")


def test_arms_and_samples(runs: Path) -> None:
    arm = runs / "acc" / "nvfp4@16"
    assert missing("arm.json", read(arm / "arm.json")) == []
    for line in (arm / "samples_replayssm_progression.jsonl").read_text(encoding="utf-8").splitlines():
        assert missing("samples_TASK.jsonl", json.loads(line)) == []


def test_bench(main: Any) -> None:
    line = "bench --scheme nvfp4@16 --tokens 4 --rows 1 --repeats 1 --device cpu --quiet --json"
    code, out, err = main(*line.split())
    assert code == 0, err
    assert missing("bench JSON", json.loads(out)) == []


def test_sizes(main: Any) -> None:
    code, out, err = main("models", "show", "tiny-gdn", "--json")
    assert code == 0, err
    assert missing("models show JSON", json.loads(out)) == []


@pytest.mark.parametrize("command", ["formats", "schemes", "models"])
def test_listings(main: Any, command: str) -> None:
    code, out, _ = main(command, "--json")
    assert code == 0
    assert {key for entry in json.loads(out) for key in entry} <= set(names("Listings"))


@pytest.mark.parametrize(("name", "file"), [(name, file) for name, files in REPORTS.items() for file in files])
def test_published_reports(name: str, file: str) -> None:
    """Runs on GPUs have keys that a CPU does not write."""
    assert missing(name, read(ROOT / "reports" / file)) == []


def test_an_undocumented_key_is_found() -> None:
    assert missing("kl.json", {"rows": [{"kl": 0.0, "surprise": 1}], "provenance": {"other": 2}}) == [
        "rows[].surprise",
        "provenance.other",
    ]


def test_every_documented_key_of_kl_exists(runs: Path) -> None:
    """Keys that only some runs have are named here; any other documented key must be in a real file."""
    sometimes = {"model.tokenizer", "provenance"}
    files = [runs / "kl" / "kl.json", ROOT / "reports" / "performance" / "nemotron-3-super.json"]
    seen = {path for file in files for path in leaves(read(file))}
    never = [p.pattern for p in documented("kl.json") if not any(p.fullmatch(path) for path in seen)]
    assert {name.replace("\\", "") for name in never} - sometimes <= {"problems[]", "options.*", "model.revision"}
