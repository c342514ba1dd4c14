"""Write docs/cli.md from the help of the commands.

The page holds names, defaults and help texts only. How typer lays out a help page changes from version to version.

python scripts/make_cli_docs.py             # writes the page
python scripts/make_cli_docs.py --check     # exits with 1 if the page is not what would be written
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from replayssm_eval.cli.main import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
_HEAD = """# Command line

`python scripts/make_cli_docs.py` makes this page from the help of the commands. Change the help, not this page.

- Results go to stdout. Progress and warnings go to stderr.
- Exit codes: 0 done, 1 a run or a check failed, 2 bad usage, 130 interrupted.
- `--config FILE.yaml` reads options from a file. A key is the name of an option. The command line wins over the file.
- Every command takes `--help`.
- `python -m replayssm_eval` is the same program as `replayssm-eval`.
"""


def _sections(command: Any, name: str) -> Iterator[str]:
    """One section for the command, then those of its subcommands."""
    options = [p for p in command.params if p.name != "help"]
    lines = [f"## {name}", "", " ".join((command.help or "").split()), ""]
    arguments = [p for p in options if p.param_type_name == "argument"]
    if arguments or options:
        shown = " ".join(p.metavar or (p.name or "").upper() for p in arguments)
        lines += ["```text", " ".join(f"{name} {shown} [OPTIONS]".split()), "```", ""]
    if options:
        lines += ["| option | default | meaning |", "|---|---|---|"]
        lines += [_table_row(p) for p in options]
        lines.append("")
    if command.epilog:
        lines += [command.epilog.replace("Example: ", "Example:\n\n    ", 1), ""]
    yield "\n".join(lines)
    for child, subcommand in getattr(command, "commands", {}).items():
        yield from _sections(subcommand, f"{name} {child}")


def _table_row(parameter: Any) -> str:
    names = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar or parameter.name.upper()]
    default = parameter.default
    shown = f"`{default}`" if isinstance(default, int | str) and not isinstance(default, bool) else ""
    cells = (", ".join(f"`{name}`" for name in names), shown, " ".join((parameter.help or "").split()))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def cli_page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_sections(typer.main.get_command(app), "replayssm-eval")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Compare instead of writing.")
    check = parser.parse_args().check
    page = cli_page()
    if not check:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        sys.exit(f"docs/{PAGE.name} is not what the help says: run python scripts/make_cli_docs.py")


if __name__ == "__main__":
    main()
