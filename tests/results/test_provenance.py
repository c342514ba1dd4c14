"""The digest of the code covers what changes a number, and nothing else."""

import shutil
from pathlib import Path

import pytest
import replayssm_emulation
import replayssm_kernels

import replayssm_eval
from replayssm_eval.results.provenance import code_digests, folder_digest


@pytest.fixture
def copied(tmp_path):
    """A function that copies a package's sources and returns the copy."""

    def copy(package) -> Path:
        folder = tmp_path / package.__name__
        ignored = shutil.ignore_patterns("assets", "__pycache__")
        shutil.copytree(Path(package.__file__).parent, folder, ignore=ignored)
        return folder

    return copy


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("package", "file", "old", "new"),
    [
        (
            replayssm_emulation,
            "formats.py",
            'E4M3 = Minifloat("e4m3", 8, 3, 7, 448.0)',
            'E4M3 = Minifloat("e4m3", 8, 3, 7, 240.0)',
        ),
        (replayssm_kernels, "triton_backend/cast.py", "0.1666666716337204", "0.1666666865348816"),
    ],
    ids=["emulation", "kernels"],
)
def test_a_changed_number_changes_the_digest(copied, package, file, old, new) -> None:
    folder = copied(package)
    assert folder_digest(folder) == code_digests()[package.__name__.removeprefix("replayssm_")]
    edit(folder / file, old, new)
    assert folder_digest(folder) != code_digests()[package.__name__.removeprefix("replayssm_")]


def test_words_leave_the_digest(copied) -> None:
    folder = copied(replayssm_kernels)
    before = folder_digest(folder)
    scan = folder / "scan.py"
    scan.write_text(f'"""Another docstring."""\n# A comment.\n{scan.read_text().split(chr(34) * 3, 2)[2]}')
    assert folder_digest(folder) == before


@pytest.mark.parametrize("file", ["kl/report.py", "kl/figure.py", "kl/options.py", "cli/kl.py"])
def test_what_only_shows_numbers_leaves_the_digest(copied, file) -> None:
    folder = copied(replayssm_eval)
    rooms = [folder / room for room in ("kl", "inference", "models")]
    before = [folder_digest(room) for room in rooms]
    (folder / file).write_text("changed = True\n")
    assert [folder_digest(room) for room in rooms] == before
    (folder / "kl" / "run.py").write_text("changed = True\n")
    assert folder_digest(rooms[0]) != before[0]
