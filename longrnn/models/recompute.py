"""Activation checkpointing: a part of the forward pass runs again instead of keeping its values.

The recomputation runs the same operations on the same tensors, so gradients have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
from torch.utils.checkpoint import checkpoint

P = ParamSpec("P")
T = TypeVar("T")

# What the backward pass computes again at a time: nothing, one block of one segment, or one segment
# with all its blocks. Of the latter only tokens and states are kept.
GRANULARITIES = ("no", "block", "segment")


def recomputed(run: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """`run(*arguments)`, of whose intermediate values none are kept for the backward pass.

    `run` draws no random numbers: position tables are drawn when a model is built.
    """
    if not torch.is_grad_enabled():
        return run(*arguments, **named)
    found = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False, **named)
    return cast(T, found)
