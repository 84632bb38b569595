"""Lines and tables for people, in which names that strangers chose cannot control the terminal.

Tables fit a terminal, and keep their columns whole in a pipe or a file.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

# Names may contain brackets and colons.
NO_MARKUP: dict[str, Any] = {"markup": False, "emoji": False}
# Characters that move the cursor, begin a command to the terminal, or turn the direction of text.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return a text with its control characters written out, as `\\x1b`; lines and tabs stay."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def say(*lines: object, error: bool = False) -> None:
    """Print lines at once, on standard output or on standard error."""
    text = printable("\n".join(map(str, lines)))
    print(text, file=sys.stderr if error else sys.stdout, flush=True)


class PlainFormatter(logging.Formatter):
    """Formats warnings."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def print_table(table: Table) -> None:
    """Prints a table of texts: in the width of a terminal, and as wide as needed elsewhere."""
    from rich.console import Console

    table.title = printable(str(table.title or ""))
    for column in table.columns:
        column.header = printable(str(column.header))
        column._cells = [printable(str(cell)) for cell in column.cells]
    console = Console(**NO_MARKUP)
    if not console.is_terminal:  # rich takes it for 80 characters wide
        width = Console(width=10_000, **NO_MARKUP).measure(table).maximum
        console.width = max(console.width, width)
    console.print(table)


def print_rows(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints rows of cells as a table."""
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    table.columns[0].overflow = "fold"  # names of checkpoints differ at their ends
    for row in rows:
        table.add_row(*row)
    print_table(table)
