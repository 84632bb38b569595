"""One call of the windowed recurrence in Triton, with the carry of `longrnn.ops.ssd.window`.

Notable choices:
- The kernels begin at the start of a chunk: a call that begins inside one computes its tokens
  again, which the carry holds.
- Gradients keep the inputs of the call and its carry. The backward pass computes the call again in
  torch and differentiates that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn import state as states
from longrnn.ops import triton as kernels
from longrnn.ops.again import gradients_of
from longrnn.ops.native import tracked
from longrnn.ops.precision import own_precision
from longrnn.ops.ssd import triton
from longrnn.ops.ssd.base import ScanInputs
from longrnn.ops.ssd.chunks import Chunk
from longrnn.ops.ssd.window_carry import WindowCarry, WindowShape

Found = tuple[Tensor, Tensor, WindowCarry]
InTorch = Callable[[ScanInputs, WindowCarry], Found]


def windowed(
    inputs: ScanInputs, carry: WindowCarry, shape: WindowShape, phase: int, in_torch: InTorch
) -> Found | None:
    """The windowed recurrence of rows that are all at one phase.

    Args:
        inputs: see `ScanInputs`.
        carry: see `WindowCarry`.
        shape: see `WindowShape`.
        phase: tokens consumed, modulo the length of a block.
        in_torch: the same in differentiable operations.

    Returns:
        y `(b, t, h, p)`, the state of the last token's window `(b, h, p, n)`, and the new carry;
        None where the kernels cannot compute it: where they cannot read a tensor, and where y is
        not finite.
    """
    tensors = [*inputs, *(leaf for _, leaf in states.leaves(carry))]
    if not kernels.suits(tensors):
        return None
    rounded = tracked(tensors)
    with torch.no_grad():
        found = _forward(inputs, carry, shape, phase, rounded=rounded)
    return _differentiable(found, inputs, carry, in_torch) if found and rounded else found


def _forward(
    inputs: ScanInputs, carry: WindowCarry, shape: WindowShape, phase: int, *, rounded: bool
) -> Found | None:
    from longrnn.ops.triton.windowed import Stacks, Window, forward

    length, offset, slot = shape.chunk, phase % shape.chunk, phase // shape.chunk
    time = offset + inputs.x.shape[1]
    complete, kept = time // length, len(carry.recent)
    chunks = -(-time // length)
    # Chunk i of the call reads the pair of chunks that begins at chunk i of all that are known.
    read = carry.recent[: chunks + 1]
    tokens = _joined(read, carry.current, inputs, offset)
    C = F.pad(inputs.C, (0, 0, 0, 0, offset, 0)) if offset else inputs.C
    # The end of a block reads and writes all slots.
    wraps = slot + complete >= shape.between
    slots = slice(0, shape.between) if wraps else slice(slot, slot + chunks)
    front = carry.front[slots]
    stacks = Stacks(
        torch.stack(front) if front else carry.back,
        slots.start,
        carry.back.clone(memory_format=torch.contiguous_format),
        carry.back_decay.clone(memory_format=torch.contiguous_format),
        carry.totals.transpose(0, 1).contiguous(),
    )
    window = Window(length, shape.rest, shape.between, slot, complete)
    found = forward(tokens, C, window, stacks, triton.CHUNK, rounded=rounded)
    if not bool(found.is_finite):
        return None
    after = carry._replace(phase=(carry.phase + inputs.x.shape[1]) % shape.block)
    new = Chunk(*(tensor[:, len(read) * length :] for tensor in tokens))
    if complete:
        # Kept chunks are shared; new ones are copied, so that the whole input can be freed.
        first = max(0, complete - kept)
        own = [_part(new, i * length, length) for i in range(first, complete)]
        after = after._replace(
            current=states.tree_map(torch.zeros_like, carry.current),
            recent=(*carry.recent[complete:], *own),
            totals=found.ends[complete:].transpose(0, 1).contiguous(),
        )
        if shape.between:
            written = slots if wraps else slice(slot, slot + complete)
            fronts = list(carry.front)
            # Each by itself, so that replacing one frees it.
            states_of = stacks.front[: written.stop - written.start]
            fronts[written] = [state.clone() for state in states_of]
            after = after._replace(
                front=tuple(fronts), back=stacks.back, back_decay=stacks.back_decay
            )
    if complete < chunks:
        after = after._replace(current=_part(new, complete * length, length))
    return found.y[:, offset:], found.state, after


def _joined(
    read: Sequence[Chunk], current: Chunk, inputs: ScanInputs, offset: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tokens of chunks, of the first `offset` slots of `current`, and of the call."""
    x, gain, log_decay, B = (
        torch.cat([*older, like[:, :offset], more.to(like.dtype)], dim=1)
        for like, more, *older in zip(current, inputs[:4], *read, strict=True)
    )
    return x, gain, log_decay, B


def _part(tokens: Chunk, start: int, length: int) -> Chunk:
    """A copy of one chunk; slots after the last token are 0."""

    def copied(tensor: Tensor) -> Tensor:
        part = tensor[:, start : start + length]
        missing = (0, 0) * (part.ndim - 2) + (0, length - part.shape[1])
        return (
            F.pad(part, missing)
            if any(missing)
            else part.clone(memory_format=torch.contiguous_format)
        )

    return states.tree_map(copied, tokens)


def _differentiable(
    found: Found, inputs: ScanInputs, carry: WindowCarry, in_torch: InTorch
) -> Found:
    """What the kernels found, with gradients of `in_torch`."""
    given = (inputs, carry)
    before = [leaf for _, leaf in states.leaves(given)]
    same = {id(leaf) for leaf in before}
    results = [leaf for _, leaf in states.leaves(found)]
    # What is passed on unchanged keeps the gradients that it has.
    new = [
        number
        for number, leaf in enumerate(results)
        if leaf.is_floating_point() and id(leaf) not in same
    ]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        again = [leaf for _, leaf in states.leaves(in_torch(*states.unflatten(given, tensors)))]
        return tuple(again[number] for number in new)

    outputs = _Again.apply(run, [results[number] for number in new], *before)
    for number, output in zip(new, outputs, strict=True):
        results[number] = output
    return states.unflatten(found, results)


class _Again(torch.autograd.Function):
    """Values that are known, whose backward pass computes them again in `run`."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., tuple[Tensor, ...]], values: list[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tensors, wants = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if all(grad is None for grad in grads):
            return (None,) * (2 + len(tensors))
        with own_precision(tensors[0]):
            if torch.is_grad_enabled():
                found = gradients_of(ctx.run, tensors, wants, grads)
            else:
                found = _gradients(ctx.run, tensors, wants, grads)
        return None, None, *found


def _gradients(
    run: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    wants: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """`gradients_of`, for gradients that are not differentiated again."""
    pairs = zip(tensors, wants, strict=True)
    leaves = [tensor.detach().requires_grad_(wish) for tensor, wish in pairs]
    with torch.enable_grad():
        outputs = run(*leaves)
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if grad is not None and output.requires_grad
    ]
    if not pairs:
        return [None] * len(wants)
    given, grads = zip(*pairs, strict=True)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(given, wanted, grads, allow_unused=True))
    return [next(found) if wish else None for wish in wants]
