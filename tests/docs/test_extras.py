"""Packages that only some commands need: whoever lacks one is told what to install, in one line."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from replayssm_emulation import UsageError, errors

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed_without(monkeypatch: pytest.MonkeyPatch):
    """Makes a package look as if it were not installed."""

    def hide(name: str) -> None:
        real = errors.find_spec
        monkeypatch.setattr(errors, "find_spec", lambda module: None if module == name else real(module))

    return hide


def test_pg19_needs_datasets(installed_without) -> None:
    from replayssm_eval.kl.corpus import load_books

    installed_without("datasets")
    with pytest.raises(UsageError, match=r"--corpus pg19 needs the package datasets: .*replayssm-eval\[pg19\]"):
        load_books("pg19")


@pytest.mark.parametrize("random_weights", [False, True])
def test_device_map_needs_accelerate(installed_without, random_weights: bool) -> None:
    from replayssm_eval.models import load

    installed_without("accelerate")
    with pytest.raises(UsageError, match=r"--device-map needs the package accelerate: .*\[multi-gpu\]"):
        load("qwen3.5-4b", device_map="auto", random_weights=random_weights)


def test_accuracy_needs_lm_eval(installed_without, main, tmp_path: Path) -> None:
    installed_without("lm_eval")
    code, _, err = main("accuracy", "--output", tmp_path / "out")
    assert code == 2
    assert err.strip() == "replayssm-eval: accuracy needs the package lm_eval: pip install 'replayssm-eval[accuracy]'"


def test_lm_evals_command_line_needs_lm_eval(installed_without, capsys: pytest.CaptureFixture[str]) -> None:
    from replayssm_eval.lm_eval import main

    installed_without("lm_eval")
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "replayssm-eval[accuracy]" in capsys.readouterr().err


def test_every_extra_that_a_message_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [path for folder in ("replayssm_eval", "tasks") for path in (ROOT / folder).rglob("*.py")]
    named = {extra for path in sources for extra in re.findall(r'require\("\w+", "([\w-]+)"', path.read_text())}
    assert named
    assert named <= set(extras)


def test_modules_of_extras_are_imported_late() -> None:
    """Importing what `kl` runs imports none of them."""
    code = (
        "import sys, replayssm_eval.kl.run, replayssm_eval.quartiles.run, replayssm_eval.bench.run, replayssm_tasks;"
        "print([m for m in ('lm_eval', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_typed() -> None:
    for package in ("replayssm_emulation", "replayssm_kernels", "replayssm_tasks", "replayssm_eval"):
        module = importlib.import_module(package)
        assert (Path(str(module.__file__)).parent / "py.typed").exists(), package


def test_version() -> None:
    import replayssm_eval

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert replayssm_eval.__version__ in (declared, "source")
    assert f"version: {declared}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {declared}\n" in (ROOT / "CHANGELOG.md").read_text()
