"""Gradients of a function by autograd, for hand-written backward passes that are differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def gradients_of(
    run: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: Sequence[Tensor | None],
    wants: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """The gradients of `run(*tensors)`, themselves differentiable.

    A backward pass that is written by hand calls this where gradients are enabled, which means that
    its result is differentiated again (`create_graph=True`).

    Args:
        run: consists of differentiable operations.
        tensors: its arguments; None where one is optional.
        wants: for which arguments a gradient is wanted; others get None.
        grads: of the outputs of `run`; None for 0.
    """
    # Aliases, because an argument may have been computed from another one.
    again = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
    found = run(*again)
    outputs = (found,) if isinstance(found, Tensor) else found
    pairs = [
        (out, grad)
        for out, grad in zip(outputs, grads, strict=True)
        if grad is not None and out.requires_grad  # such as zeros, which depend on nothing
    ]
    if not pairs:
        return (None,) * len(wants)
    wanted = [one for one, wish in zip(again, wants, strict=True) if wish and one is not None]
    outputs, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True)
    gradients = iter(found)
    return tuple(next(gradients) if wish else None for wish in wants)
