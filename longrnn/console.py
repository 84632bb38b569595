"""Tables on the terminal that keep their columns whole where the output is not a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def print_table(table: Table, width: int) -> None:
    """Prints a table on at least `width` characters per line, more if the terminal is wider.

    A pipe or a file counts as 80 characters wide, which would break long names and numbers.
    """
    from rich.console import Console

    Console(width=max(Console().width, width)).print(table)
