"""Which contract tests of the Triton kernels run, and which of them by default.

In Triton's interpreter one program, a few tokens of one head, takes about 20 ms. The cases below
reach every kernel, several chunks and segments, and every kind of trouble; the others are slow.
Cases that differ in what no kernel sees are not run: position encodings, and mitigations that only
change numbers which the recurrence gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from longrnn.mitigations import MITIGATIONS
from longrnn.mitigations.base import Stage
from longrnn.ops.triton import interpreting

Parameters = Mapping[str, Any]
FLOAT32, FLOAT64 = torch.float32, torch.float64

# By the name of a test: which of its cases with the backend `triton` run by default.
BY_DEFAULT: dict[str, Callable[[Parameters], bool]] = {
    "test_every_length_equals_the_loop": lambda case: (
        (case["time"], case["dtype"], case["decay"].__name__)
        in {
            (1, FLOAT64, "wide_decay"),
            (3, FLOAT32, "no_decay"),
            (65, FLOAT64, "wide_decay"),
            (65, FLOAT32, "one_strong_then_slow"),
        }
    ),
    "test_groups": lambda case: case["dtype"] == FLOAT32 and case["heads"] == 6,
    "test_state_stays_wide": lambda case: True,
    "test_arguments_are_kept": lambda case: case["time"] < 70,
    "test_one_token_of_any_decay": lambda case: case["log_decay"] in (0.0, -0.7, -torch.inf),
    "test_every_split_equals_the_loop": lambda case: (
        case["sizes"] == [1] and case["dtype"] == FLOAT64
    ),
    "test_recurrences_keep_their_precision": lambda case: case["time"] == 1,
}


def _uses_triton(case: Parameters) -> bool:
    """Whether a parameter is the name of the backend, or options of a mixer that name it."""
    named = [value.get("backend") for value in case.values() if isinstance(value, dict)]
    return "triton" in [*named, *(value for value in case.values() if isinstance(value, str))]


def _is_redundant(case: Parameters) -> bool:
    """Whether the kernels compute in this case what they compute in another one."""
    specs = [value for value in case.values() if isinstance(value, dict)]
    specs += [spec for value in case.values() if isinstance(value, list) for spec in value]
    kinds = [spec["kind"] for spec in specs if isinstance(spec, dict) and "kind" in spec]
    stages = [MITIGATIONS[kind].stage for kind in kinds if kind in MITIGATIONS and kind != "none"]
    return case.get("position", "none") != "none" or any(one != Stage.SCAN for one in stages)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the other cases as slow, before pytest deselects what is slow."""
    redundant = []
    for item in items:
        found = getattr(item, "callspec", None)
        if not interpreting() or found is None or not _uses_triton(found.params):
            continue
        if _is_redundant(found.params):
            redundant.append(item)
            continue
        chosen = BY_DEFAULT.get(getattr(item, "originalname", item.name), lambda case: False)
        if not chosen(found.params):
            item.add_marker(pytest.mark.slow)
    if redundant:
        config.hook.pytest_deselected(items=redundant)
        items[:] = [item for item in items if item not in redundant]
