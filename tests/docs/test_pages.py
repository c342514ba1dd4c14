"""The pages are true: commands parse, links lead somewhere, tables follow from the code, docs/cli.md is the help."""

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from replayssm_emulation import parse_scheme

from replayssm_eval.cli.main import app

ROOT = Path(__file__).parents[2]
WRITTEN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*WRITTEN, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "reports").glob("*/*.md"))]
MOST_WORDS = 750


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path) -> list[str]:
    """The `replayssm-eval ...` command lines of a page: of indented blocks and of inline code."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^ {4,}(?:\.venv/bin/)?(replayssm-eval .*)$", text, flags=re.M)
    lines += re.findall(r"`(replayssm-eval [^`\n]+)`", text)
    # Help texts end an example with `;` or with a remark in brackets.
    return [re.split(r";| \(", line)[0].replace(" ... ", " ") for line in lines if "[OPTIONS]" not in line]


def without_callbacks(command: Any) -> Any:
    """The command, which then parses its arguments and does nothing. `--config` does not open its file."""
    command.callback = lambda **values: None
    for parameter in command.params:
        if parameter.name == "config":
            parameter.callback = None
    for child in getattr(command, "commands", {}).values():
        without_callbacks(child)
    return command


def parse(line: str) -> None:
    """Raises the parser's exception for a line that does not parse, UsageError for a bad scheme."""
    words = shlex.split(line, comments=True)
    without_callbacks(typer.main.get_command(app)).main(words[1:], prog_name=words[0], standalone_mode=False)
    for flag, value in itertools.pairwise(words):
        if flag == "--scheme":
            parse_scheme(value)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_the_front_page_says_first_what_has_not_been_done() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M)
    assert headings[0] == "What has not been done"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.M)
            assert anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings], target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_parse(page: Path) -> None:
    for line in commands(page):
        parse(line)


def test_commands_are_found_and_bad_ones_refused() -> None:
    assert len([line for page in PAGES for line in commands(page)]) > 20
    for line in ("replayssm-eval kl --tokenz 5", "replayssm-eval kl --tokens x", "replayssm-eval nothing"):
        with pytest.raises(Exception, match=r"tokenz|valid integer|No such command"):
            parse(line)


def test_scripts_and_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for script in re.findall(r"\b(scripts/\w+\.py)", text):
            assert (ROOT / script).exists(), f"{page.name}: {script}"
        for target in re.findall(r"(?:^ {4}|`)make ([\w-]+)", text, flags=re.M):
            assert re.search(rf"^{target}:", makefile, flags=re.M), f"{page.name}: make {target}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_cited_files_exist(page: Path) -> None:
    """Of this repository; other repositories' files and the outputs of runs have other first folders."""
    if page.name == "CHANGELOG.md":  # tells of files that are gone
        return
    for cited in re.findall(r"`([\w./-]+/[\w./-]*)`", page.read_text(encoding="utf-8")):
        if (ROOT / cited.split("/")[0]).is_dir():
            assert (ROOT / cited).exists(), cited


@pytest.mark.parametrize("page", ["README.md", "docs/schemes.md"])
def test_bits_and_bytes_of_schemes(page: str) -> None:
    """Of the copies of one head of 64 x 128."""
    rows = re.findall(
        r"^\| (`[^|]+`) \| [^|]+ \| ([\d.]+) \| ([\d,]+) \|", (ROOT / page).read_text(encoding="utf-8"), flags=re.M
    )
    assert len(rows) >= 6
    for names, bits, stored in rows:
        for name in re.findall(r"`([^`]+)`", names):
            scheme = parse_scheme(name)
            copies = [copy for copy in (scheme.recurrence, scheme.read) if copy is not None]
            total = sum(copy.format.bits_per_element(64, 128) for copy in copies)
            assert float(bits) == round(total, 3), name
            assert int(stored.replace(",", "")) == round(total * 64 * 128 / 8), name


def test_the_long_description_needs_no_repository() -> None:
    """An index page resolves neither relative links nor relative figures."""
    text = (ROOT / "docs" / "pypi.md").read_text(encoding="utf-8")
    assert "](" not in text
    assert "<img" not in text


def test_the_command_line_page_is_the_help() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_cli_docs.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_python_page_runs(tmp_path: Path) -> None:
    (code,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), flags=re.M | re.S
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "from-python" / "kl.json").exists()
