"""Tables on stdout."""

import json
from collections.abc import Sequence
from typing import Any


def console() -> Any:
    """A console of rich. A file or pipe has no width, and rich would cut tables to 80 columns there."""
    from rich.console import Console

    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=210)


def print_listing(title: str, columns: tuple[str, ...], rows: Sequence[tuple[Any, ...]], as_json: bool) -> None:
    """Print rows as a table, or as a JSON list with one object per row."""
    if as_json:
        keys = [c.replace(" ", "_") for c in columns]
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=1, ensure_ascii=False))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0], overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console().print(table)
