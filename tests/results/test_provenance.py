"""The digest of the code covers what changes a number, and nothing that only explains or shows it."""

import shutil
from pathlib import Path

import pytest
import replayssm_emulation
import replayssm_kernels
import replayssm_tasks

import replayssm_eval
from replayssm_eval.results.provenance import code_digest, code_digests, folder_digest

PACKAGES = {"emulation": replayssm_emulation, "kernels": replayssm_kernels, "tasks": replayssm_tasks}


@pytest.fixture
def copied(monkeypatch, tmp_path):
    """Copies of all packages by room. The digests read the copies."""
    folders = {}
    for room, package in {**PACKAGES, "eval": replayssm_eval}.items():
        folders[room] = tmp_path / room
        ignored = shutil.ignore_patterns("assets", "__pycache__")
        shutil.copytree(Path(package.__file__).parent, folders[room], ignore=ignored)
        monkeypatch.setattr(package, "__file__", str(folders[room] / "__init__.py"))
    return folders


@pytest.mark.parametrize(
    ("room", "place", "file"),
    [
        ("emulation", "emulation", "rounding.py"),
        ("kernels", "kernels", "triton_backend/cast.py"),
        ("kernels", "kernels", "torch_backend/plain.py"),
        ("tasks", "tasks", "grading.py"),
        ("models", "eval", "models/families/__init__.py"),
        ("inference", "eval", "inference/metrics.py"),
        ("kl", "eval", "kl/corpus.py"),
        ("accuracy", "eval", "accuracy/backend.py"),
    ],
)
def test_changed_code_changes_the_digest_of_its_room_only(copied, room, place, file) -> None:
    before, combined = code_digests(replayssm_tasks), code_digest(replayssm_tasks)
    path = copied[place] / file
    path.write_text(path.read_text() + "\nANOTHER = 1\n")
    after = code_digests(replayssm_tasks)
    assert [name for name in before if before[name] != after[name]] == [room]
    assert code_digest(replayssm_tasks) != combined


def test_docstrings_comments_and_reports_change_no_digest(copied) -> None:
    before = code_digests(replayssm_tasks)
    for path in (copied["emulation"] / "rounding.py", copied["eval"] / "kl" / "corpus.py"):
        path.write_text('"""Another docstring."""\n# another comment\n' + path.read_text().split('"""', 2)[2])
    for file in ("kl/report.py", "kl/figure.py", "kl/options.py", "cli/kl.py", "kl/templates/kl.md"):
        path = copied["eval"] / file
        path.write_text(path.read_text() + "\nANOTHER = 1\n")
    assert code_digests(replayssm_tasks) == before


def test_docstrings_of_functions_do_not_count(tmp_path) -> None:
    digests = set()
    for docstring in ("One.", "Two."):
        (tmp_path / "a.py").write_text(f'def f():\n    """{docstring}"""\n    return 1\n')
        digests.add(folder_digest(tmp_path))
    assert len(digests) == 1
    (tmp_path / "a.py").write_text('def f():\n    """One."""\n    return 2\n')
    assert folder_digest(tmp_path) not in digests


def test_an_empty_folder_has_no_digest(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no source file"):
        folder_digest(tmp_path)
