"""Rows of a batch with numbers that are not finite are computed apart from the others.

A matrix product over tokens leaves a token out by multiplying it with 0, and 0 · NaN is NaN: one
token that is not finite would reach outputs that it has no part in. Masks over the inputs of every
product would cost each call several passes over large tensors. Instead the result is checked, and
only the rows in which something is not finite are computed again, one token after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from longrnn.state import take, tree_map

T = TypeVar("T")


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite, from one sum.

    A sum of finite entries may overflow: false is then a false alarm, and true is always right.
    """
    return math.isfinite(tensor.detach().sum().item())


def finite_rows(tensor: Tensor) -> Tensor:
    """Which rows have no entry that is NaN or infinite, `(b,)` bool."""
    return tensor.detach().flatten(1).isfinite().all(1)


def apart(
    finite: Tensor, fast: Callable[..., T], careful: Callable[..., T], *arguments: object
) -> T:
    """Runs `fast` on the finite rows and `careful` on the others.

    Args:
        finite: `(b,)` bool, not all true.
        fast: takes and gives trees of tensors whose first axis is the batch.
        careful: the same function, one token after another.
        arguments: of both.
    """
    if not bool(finite.any()):
        return careful(*arguments)
    groups = [finite.nonzero()[:, 0], (~finite).nonzero()[:, 0]]
    parts = [
        run(*(take(argument, rows) for argument in arguments))
        for run, rows in zip((fast, careful), groups, strict=True)
    ]
    joined = tree_map(lambda *leaves: torch.cat(leaves), *parts)
    return take(joined, torch.cat(groups).argsort())
