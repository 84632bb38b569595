"""One call of the windowed recurrence in Triton, with the carry of `longrnn.ops.ssd.window`.

Notable choices:
- The kernels begin at the start of a chunk: a call that begins inside one computes its tokens
  again, which the carry holds.
- Gradients keep the inputs of the call and its carry. The backward pass computes y again from plain
  recurrences (`window_parts`), whose backward passes are kernels. Where more than the gradients of
  the inputs through y is needed, as where segments of a text are checkpointed, it computes the call
  again in torch and differentiates that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from longrnn.ops.ssd.window_parts import outputs

Found = tuple[Tensor, Tensor, WindowCarry]
InTorch = Callable[[ScanInputs, WindowCarry], Found]
Run = Callable[..., tuple[Tensor, ...]]

# The backward pass computes as many rows at a time as have states of segments of this many bytes.
BYTES_AT_ONCE = 2**30


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
    if found is None or not rounded:
        return found
    again = _Again.of(inputs, carry, shape, phase, in_torch)
    return _differentiable(found, inputs, carry, again)


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


class _Again(NamedTuple):
    """How a call is computed again in differentiable operations.

    Attributes:
        whole: all results of the call.
        outputs: y alone; it depends on the tokens in the carry, and not on its sums.
        rows: for how many rows at a time `outputs` runs, so that few states exist at once.
    """

    whole: InTorch
    outputs: Callable[[ScanInputs, WindowCarry], Tensor]
    rows: int

    @classmethod
    def of(
        cls, inputs: ScanInputs, carry: WindowCarry, shape: WindowShape, phase: int, whole: InTorch
    ) -> _Again:
        offset, state = phase % shape.chunk, carry.back[0]

        def y_of(inputs: ScanInputs, carry: WindowCarry) -> Tensor:
            known = Chunk(*_joined(carry.recent, carry.current, inputs, offset))
            C = F.pad(inputs.C, (0, 0, 0, 0, offset, 0)) if offset else inputs.C
            return outputs(known, C, shape, triton.ssd, state.dtype)[:, offset:]

        segments = (offset + inputs.x.shape[1]) // shape.chunk + shape.whole
        states_of_row = segments * state.numel() * state.element_size()
        return cls(whole, y_of, max(1, BYTES_AT_ONCE // states_of_row))


def _differentiable(found: Found, inputs: ScanInputs, carry: WindowCarry, again: _Again) -> Found:
    """What the kernels found, with gradients of `again`."""
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
    assert new[0] == 0  # y

    def whole(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = [leaf for _, leaf in states.leaves(again.whole(*states.unflatten(given, tensors)))]
        return tuple(found[number] for number in new)

    def y_alone(*tensors: Tensor) -> tuple[Tensor, ...]:
        return (again.outputs(*states.unflatten(given, tensors)),)

    values = [results[number] for number in new]
    wrapped = _Known.apply(whole, y_alone, again.rows, values, *before)
    for number, output in zip(new, wrapped, strict=True):
        results[number] = output
    return states.unflatten(found, results)


class _Known(torch.autograd.Function):
    """Values that are known, whose backward pass computes them again.

    In `whole`, or in `y_alone` where only the gradients of the `ScanInputs`, which are the first
    tensors, through the first value are needed.
    """

    @staticmethod
    def forward(
        ctx: Any, whole: Run, y_alone: Run, rows: int, values: list[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.whole, ctx.y_alone, ctx.rows = whole, y_alone, rows
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tensors, wants = ctx.saved_tensors, ctx.needs_input_grad[4:]
        if all(grad is None for grad in grads):
            return (None,) * (4 + len(tensors))
        of_inputs = not any(wants[len(ScanInputs._fields) :])
        grad_y, others = grads[0], grads[1:]
        with own_precision(tensors[0]):
            if torch.is_grad_enabled():
                found = gradients_of(ctx.whole, tensors, wants, grads)
            elif of_inputs and grad_y is not None and all(one is None for one in others):
                found = _gradients_of_rows(ctx.y_alone, tensors, wants, grad_y, ctx.rows)
            else:
                found = _gradients(ctx.whole, tensors, wants, grads)
        return None, None, None, None, *found


def _gradients_of_rows(
    run: Run, tensors: Sequence[Tensor], wants: Sequence[bool], grad: Tensor, rows: int
) -> list[Tensor | None]:
    """`_gradients` of `rows` rows at a time, each of which depends on its own rows alone."""
    parts = [
        _gradients(run, part[:-1], wants, part[-1:])
        for part in zip(*(one.split(rows) for one in (*tensors, grad)), strict=True)
    ]
    return [None if one[0] is None else torch.cat(one) for one in zip(*parts, strict=True)]


def _gradients(
    run: Run,
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
