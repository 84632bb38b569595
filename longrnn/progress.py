"""Progress of long work, as a bar of tqdm."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from longrnn.processes import is_main

# Seconds between updates, on a terminal and in a file.
TERMINAL, FILE = 0.1, 10.0


class Progress:
    """Counts up to `total`; a context manager that writes to standard error.

    Args:
        title: what is being done.
        total: how many steps there are; None where that is not known.
        unit: what the rate counts, for example `tokens`.
        quiet: write nothing at all.
    """

    def __init__(self, title: str, total: int | None, *, unit: str, quiet: bool = False) -> None:
        from tqdm import tqdm

        self.unit, self.done, self.units = unit, 0, 0
        self._begun = time.monotonic()
        every = TERMINAL if sys.stderr.isatty() else FILE
        self._bar = tqdm(desc=title, total=total, disable=quiet or not is_main(), mininterval=every)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def advance(self, steps: int, units: int, note: str = "") -> None:
        """Counts `steps` of the total, which took `units`; `note` is shown beside the rate."""
        self.done += steps
        self.units += units
        rate = self.units / max(time.monotonic() - self._begun, 1e-9)
        self._bar.set_postfix_str(f"{rate:,.0f} {self.unit}/s {note}".rstrip(), refresh=False)
        self._bar.update(steps)
