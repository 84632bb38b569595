"""Computes groups of rows of a batch separately, such as the rows that hold NaN or infinity.

A matrix product over tokens excludes a token by multiplying it by 0, and 0 · NaN is NaN: one token
that is not finite would reach outputs that do not depend on it. Masking the inputs of every product
would cost each call several passes over large tensors. Instead the result is checked, and only the
rows that are not finite are computed again, one token at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from longrnn.state import join, take

T = TypeVar("T")
Rows = Tensor | Sequence[int]


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite, judged by the sum alone.

    A sum of finite entries may overflow, so false may be a false alarm; true is always right.
    """
    return math.isfinite(tensor.detach().sum().item())


def finite_rows(tensor: Tensor) -> Tensor:
    """Which rows have no entry that is NaN or infinite, `(b,)` bool."""
    return tensor.detach().flatten(1).isfinite().all(1)


def run_groups(groups: Sequence[tuple[Rows, Callable[..., T]]], *arguments: object) -> T:
    """Runs one function per group of rows, and joins the results in the order of the batch.

    Args:
        groups: the row numbers of a group, and its function. Each row is in exactly one group.
        arguments: trees of tensors whose first axis is the batch; each function gets its rows.
    """
    parts = [run(*(take(argument, rows) for argument in arguments)) for rows, run in groups]
    order = torch.cat([torch.as_tensor(rows) for rows, _ in groups])
    return take(join(parts), order.argsort())


def run_by_finiteness(
    finite: Tensor, fast: Callable[..., T], careful: Callable[..., T], *arguments: object
) -> T:
    """Runs `fast` on the finite rows and `careful` on the others.

    Args:
        finite: `(b,)` bool, not all true.
        fast: takes and returns trees of tensors whose first axis is the batch.
        careful: the same function, computed one token at a time.
        arguments: of both functions.
    """
    if not bool(finite.any()):
        return careful(*arguments)
    groups = [(finite.nonzero()[:, 0], fast), ((~finite).nonzero()[:, 0], careful)]
    return run_groups(groups, *arguments)


def run_by_phase(run: Callable[..., T], phase: Tensor, *arguments: object) -> T:
    """Runs a function on the rows of each phase.

    Args:
        run: takes the arguments of its rows and, last, their phase.
        phase: `(b,)` int64.
        arguments: trees of tensors whose first axis is the batch.
    """
    phases = phase.tolist()
    found = sorted(set(phases))
    if len(found) == 1:
        return run(*arguments, found[0])

    def of(one: int) -> Callable[..., T]:
        return lambda *given: run(*given, one)

    groups = [([row for row, other in enumerate(phases) if other == one], of(one)) for one in found]
    return run_groups(groups, *arguments)
