"""Progress of long work, as a bar of tqdm."""

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm

from longrnn.console import printable
from longrnn.errors import UserError
from longrnn.processes import is_main

# The variable of tqdm that `longrnn --quiet` sets, also for the processes that it starts.
QUIET = "TQDM_DISABLE"
# Seconds between updates, on a terminal and in a file.
TERMINAL, FILE = 0.1, 10.0
# That of tqdm without its rate of steps: ours counts units.
BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_DEADLINE: ContextVar[float] = ContextVar("deadline", default=math.inf)


def is_quiet() -> bool:
    """Whether this process and those that it starts show no progress."""
    return QUIET in os.environ


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A context in which `check_time`, which every progress calls, raises when time is up."""
    token = _DEADLINE.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


class OutOfTimeError(UserError):
    """The time of `time_limit` is up."""


def check_time() -> None:
    """Raises `OutOfTimeError` if the time of `time_limit` is up."""
    if time.monotonic() > _DEADLINE.get():
        raise OutOfTimeError("the time that this may take is up: allow more")


class Progress(tqdm):
    """Counts up to `total`; a context manager that writes to standard error.

    Args:
        title: what is being done.
        total: how many steps there are; None where that is not known.
        unit: what the rate counts, for example `tokens`.
        quiet: write nothing at all.

    Attributes:
        done: steps so far.
        units: how many units they took.
    """

    def __init__(self, title: str, total: int | None, *, unit: str, quiet: bool = False) -> None:
        self.done, self.units, self.rate_unit = 0, 0, unit
        every, columns = FILE, None
        if sys.stderr.isatty():  # a terminal without a size would show nothing
            every, columns = TERMINAL, os.get_terminal_size(sys.stderr.fileno()).columns or 80
        silent = quiet or is_quiet() or not is_main()
        super().__init__(
            desc=printable(title),
            total=total,
            disable=silent,
            mininterval=every,
            ncols=columns,
            bar_format=BAR_FORMAT,
        )

    def advance(self, steps: int, units: int, note: str = "") -> None:
        """Counts `steps` of the total, which took `units`; `note` is shown beside the rate."""
        check_time()
        self.done += steps
        self.units += units
        rate = self.units / max(self.format_dict["elapsed"], 1e-9)
        shown = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        note = printable(f"{shown} {self.rate_unit}/s {note}".rstrip())
        self.set_postfix_str(note, refresh=False)
        self.update(steps)
