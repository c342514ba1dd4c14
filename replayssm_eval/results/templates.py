"""Pages by jinja2: HTML is escaped, a missing value is an error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .plotting import thousands


def number(value: float | None, digits: int = 3) -> str:
    """A figure for a table: `digits` significant digits, a dash for nothing."""
    return "–" if value is None else "0" if value == 0 else f"{value:.{digits}g}"


def environment(folder: Path, escape: bool, shared: Mapping[str, Any]) -> Any:
    """The jinja2 environment of the templates in `folder`.

    escape: whether text is escaped, for HTML. shared: names that every template may use.
    """
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=escape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters["number"] = number
    made.filters["thousands"] = thousands
    made.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    made.globals.update(shared)
    return made


def picture(svg: str) -> Any:
    """Our own drawing, for a page in which everything else is escaped."""
    import markupsafe

    return markupsafe.Markup(svg[svg.index("<svg") :])
