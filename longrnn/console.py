"""Tables on the terminal that keep their columns whole where the output is not a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

# Names may contain brackets and colons.
PLAIN: dict[str, Any] = {"markup": False, "emoji": False}


def print_table(table: Table, width: int | None = None) -> None:
    """Prints a table on at least `width` characters per line, more if the terminal is wider.

    A pipe or a file counts as 80 characters wide, which would break long names and numbers.

    Args:
        table: of plain texts.
        width: by default that of the table.
    """
    from rich.console import Console

    least = width or Console(width=10_000, **PLAIN).measure(table).maximum
    Console(width=max(Console().width, least), **PLAIN).print(table)


def print_rows(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, width: int
) -> None:
    """Prints rows of cells as a table."""
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    table.columns[0].overflow = "fold"  # names of checkpoints differ at their ends
    for row in rows:
        table.add_row(*row)
    print_table(table, width)
