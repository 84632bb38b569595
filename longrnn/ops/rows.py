"""Computes the rows of each phase of a window separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from longrnn.state import join, take

T = TypeVar("T")


def run_by_phase(run: Callable[..., T], phase: Tensor, *arguments: object) -> T:
    """Runs a function on the rows of each phase, and joins the results in the order of the batch.

    Args:
        run: takes the arguments of its rows and, last, their phase.
        phase: `(b,)` int64.
        arguments: trees of tensors whose first axis is the batch.
    """
    phases = phase.tolist()
    found = sorted(set(phases))
    if len(found) == 1:
        return run(*arguments, found[0])
    groups = [[row for row, other in enumerate(phases) if other == one] for one in found]
    parts = [
        run(*(take(argument, rows) for argument in arguments), one)
        for one, rows in zip(found, groups, strict=True)
    ]
    order = torch.cat([torch.as_tensor(rows) for rows in groups])
    return take(join(parts), order.argsort())
