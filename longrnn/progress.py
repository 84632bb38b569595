"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from longrnn.processes import is_main


class Progress:
    """Counts up to `total`; a context manager that writes to standard error.

    Args:
        title: what is being done.
        total: how many steps there are; None where that is not known.
        unit: what the rate counts, for example `tokens`.
        quiet: write nothing at all.
        every: seconds between plain lines.
    """

    def __init__(
        self, title: str, total: int | None, *, unit: str, quiet: bool = False, every: float = 10.0
    ) -> None:
        self.title, self.total, self.unit, self.every = title, total, unit, every
        self.quiet = quiet or not is_main()
        self.done = 0
        self.units = 0
        self._first = self._last = time.monotonic()
        self._bar = None
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(title, total=total, note="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, steps: int, units: int, note: str = "") -> None:
        """Counts `steps` of the total, which took `units`; `note` is shown beside the rate."""
        self.done += steps
        self.units += units
        now = time.monotonic()
        rate = self.units / max(now - self._first, 1e-9)
        text = f"{rate:,.0f} {self.unit}/s {note}".rstrip()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, note=text)
        elif not self.quiet and (now - self._last > self.every or self.done == self.total):
            self._last = now
            line = f"{self.title}: {self.done}"
            if self.total is None:
                line += f", {text}"
            else:
                left = (now - self._first) / max(self.done, 1) * (self.total - self.done)
                line += f"/{self.total}, {text}, {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)
