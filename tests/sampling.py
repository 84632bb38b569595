"""Products of options of which the default tests try some, and `make slow` all."""

import os
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import pytest

# Another number chooses others; a failure names its case.
SEED = os.environ.get("LONGRNN_SAMPLE", "0")


def sampled(
    cases: Mapping[str, Any],
    one_of: int,
    *,
    salt: str = "",
    always: Callable[[str], bool] = lambda name: False,
) -> list[Any]:
    """Parameters of all cases, of which one in `one_of` and those of `always` are not slow.

    Args:
        cases: by name; a tuple is several arguments.
        one_of: the size of the group from which one is tried, as a rule.
        salt: with another one, others are chosen.
        always: whether a case is tried in every run.
    """
    found = []
    for name, case in cases.items():
        is_chosen = crc32(f"{SEED}/{salt}/{name}".encode()) % one_of == 0 or always(name)
        values = case if type(case) is tuple else (case,)  # and not a named tuple
        marks = [] if is_chosen else [pytest.mark.slow]
        found.append(pytest.param(*values, id=name, marks=marks))
    return found
