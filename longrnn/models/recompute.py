"""Activation checkpointing: a part of the forward pass runs again instead of keeping its values.

The recomputation runs the same operations on the same tensors, so gradients have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from longrnn.errors import UserError, nearest

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


class RecomputedModel(nn.Module):
    """A model that can compute the activations of its blocks again.

    Attributes:
        recomputation: one of `GRANULARITIES`.
    """

    # Not `gradient_checkpointing`: transformers and PEFT take a module's attribute of that name for
    # a switch, and any word for on.
    recomputation = "no"
    blocks: nn.ModuleList

    def gradient_checkpointing_enable(self, every: str = "block") -> None:
        """Computes activations again in the backward pass instead of keeping them.

        Args:
            every: `block` keeps the input of each block and its state at each segment; `segment`
                keeps the states alone, and computes all blocks of a segment again at once; `no`
                keeps everything.

        Raises:
            UserError: another word.
        """
        if every not in GRANULARITIES:
            raise UserError(
                f"unknown gradient_checkpointing {every!r}: {nearest(every, GRANULARITIES)}"
            )
        self.recomputation = every
        for block in self.blocks:
            block.recompute = every == "block"  # type: ignore[assignment]

    def gradient_checkpointing_disable(self) -> None:
        """Keeps all activations, as by default."""
        self.gradient_checkpointing_enable("no")
