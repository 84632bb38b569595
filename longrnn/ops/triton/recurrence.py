# pyright: reportArgumentType=false, reportCallIssue=false
"""The recurrence as calls of the kernels in `longrnn.ops.triton.scan`.

Notable choices:
- Nothing here waits for the GPU. `scan` marks the heads whose output is not finite, and `by_token`
  computes those again, one token at a time; for other heads it ends at once.
- x, B and C may be views of a wider tensor, such as the output of the convolution: their rows and
  tokens may lie at any distance.
- The forward pass keeps the states between segments; the backward pass, `recurrence_gradient`,
  computes those between chunks again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from longrnn.ops.triton import interpreting, on_device, readable
from longrnn.ops.triton.device import FULL, ONE, TWO, tile
from longrnn.ops.triton.scan import by_token, passing, scan, walk

# `by_token` computes at most this many tokens, if no gradient is needed.
MAX_SEQUENTIAL = 2
# Entries of a state that a program of `passing` carries.
PASSING_BLOCK = 1024
# Larger chunks would need more registers and shared memory than a GPU has.
LARGEST_CHUNK = {torch.bfloat16: 64, torch.float32: 16, torch.float64: 16}


class Operands(NamedTuple):
    """Tensors as the kernels read them.

    Attributes:
        x: `(b, t, h, p)`; the last two axes of x, B and C are contiguous.
        gain: `(b, t, h)`, contiguous, as log_decay is.
        log_decay: `(b, t, h)`.
        B: `(b, t, g, n)`, in the dtype of x.
        C: `(b, t, g, n)`, in the dtype of x.
        state: `(b, h, p, n)`, contiguous, float32 or float64.
    """

    x: Tensor
    gain: Tensor
    log_decay: Tensor
    B: Tensor
    C: Tensor
    state: Tensor

    @property
    def heads(self) -> int:
        """The heads of all rows."""
        return self.state.shape[0] * self.state.shape[1]


class Plan(NamedTuple):
    """How a call is cut.

    Attributes:
        mode: of products, see `longrnn.ops.triton.device`.
        chunk: tokens per chunk.
        segment: tokens per segment, a multiple of chunk.
        segments: number of segments.
    """

    mode: int
    chunk: int
    segment: int
    segments: int


def operands(
    x: Tensor, gain: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, state: Tensor
) -> Operands:
    """Casts and copies only what the kernels cannot read as it is."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, B.dtype), C.dtype)
    if dtype != torch.bfloat16 or state.dtype == torch.float64:
        dtype = state.dtype
    x, B, C = (packed(readable(tensor.to(dtype))) for tensor in (x, B, C))
    return Operands(
        x,
        gain.to(state.dtype).contiguous(),
        log_decay.to(torch.promote_types(log_decay.dtype, state.dtype)).contiguous(),
        B,
        C,
        state.contiguous(),
    )


def packed(tensor: Tensor) -> Tensor:
    """A tensor whose last two axes are contiguous."""
    close = tensor.stride(3) == 1 and tensor.stride(2) == tensor.shape[3]
    return tensor if close else tensor.contiguous()


def plan(given: Operands, chunk: int, segment: int, *, rounded: bool) -> Plan:
    """Chooses the sizes and the mode of a call.

    Args:
        given: the tensors.
        chunk: tokens per chunk, made a size that the kernels know.
        segment: tokens per segment, rounded up to whole chunks.
        rounded: whether operands that are computed may be rounded to bfloat16.
    """
    time = given.x.shape[1]
    mode = FULL if given.x.dtype == given.state.dtype else ONE if rounded else TWO
    chunk = min(tile(chunk), tile(time))
    if not interpreting():
        chunk = min(chunk, LARGEST_CHUNK[given.x.dtype])
    segment = triton.cdiv(segment, chunk) * chunk
    return Plan(mode.value, chunk, segment, triton.cdiv(time, segment))


def forward(
    given: Operands, how: Plan, *, sequential: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """y `(b, t, h, p)`, the final state, the states before segments, and the trouble of each head.

    Args:
        given: the tensors.
        how: see `Plan`.
        sequential: computes one token at a time.

    Returns:
        y and the final state in the dtype of the state; the states `(segments, b, h, p, n)`, None
        if there is only one segment; int32 `(b h, …)`, not 0 where y is not finite before
        `by_token` computes it again.
    """
    x, state = given.x, given.state
    time, p = x.shape[1], x.shape[3]
    y, final = state.new_empty(x.shape), torch.empty_like(state)
    sizes = sizes_of(given)
    tiles = triton.cdiv(p, sizes["BP"])
    trouble = state.new_empty((given.heads, how.segments * tiles), dtype=torch.int32)
    before = None
    with on_device(x):
        if how.segments > 1 and not sequential:
            before = segment_states(given, how, final)
        first = state if before is None else before
        args = (*given[:5], first, final, y, trouble, time, how.segment, given.heads)
        if not sequential:
            scan[how.segments * given.heads, tiles](
                *args, *strides_of(x, given.B, given.C),
                **sizes, L=how.chunk, MODE=how.mode, FINAL=before is None,
                FROM_ZERO=False, ADD=False, num_warps=8,
            )  # fmt: skip
        by_token[given.heads, tiles](
            *args, how.segments, *strides_of(x, given.B, given.C),
            **sizes, TILES=tiles, BLOCK=triton.next_power_of_2(trouble.shape[1]),
            ALWAYS=sequential, num_warps=4,
        )  # fmt: skip
    return y, final, before, trouble


def segment_states(given: Operands, how: Plan, final: Tensor) -> Tensor:
    """The state before each segment, `(segments, b, h, p, n)`; writes the state after the last."""
    return states_between(
        (given.x, given.gain, given.log_decay, given.B), given.state, given, how, final
    )


def states_between(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    state: Tensor,
    given: Operands,
    how: Plan,
    final: Tensor,
    *,
    reverse: bool = False,
) -> Tensor:
    """States before segments, or the gradients of the states after them (`reverse`).

    Args:
        tensors: x, gain, log_decay and B, or their counterparts of `walk` in reverse.
        state: before the first segment, or the gradient of the final state.
        given: for sizes.
        how: see `Plan`.
        final: where the state after the last segment is written, or the gradient of the first.
        reverse: see above.
    """
    b, h, p, n = state.shape
    added = state.new_empty((how.segments, b, h, p, n))
    total = state.new_empty((how.segments, b, h), dtype=torch.float64)
    start_walk(tensors, None, None, added, total, given, how, reverse=reverse)
    grid = (given.heads, triton.cdiv(p * n, PASSING_BLOCK))
    passing[grid](
        added, total, state, final, how.segments, given.heads,
        M=p * n, BLOCK=PASSING_BLOCK, REVERSE=reverse,
    )  # fmt: skip
    return added


def start_walk(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    first: Tensor | None,
    every: Tensor | None,
    last: Tensor | None,
    total: Tensor | None,
    given: Operands,
    how: Plan,
    *,
    reverse: bool,
    skip: int = 0,
) -> None:
    """Starts the kernel `walk`; tensors that are None are neither read nor written.

    Args:
        tensors: see `states_between`.
        first: as in `walk`, like the next three.
        every: see above.
        last: see above.
        total: see above.
        given: for sizes.
        how: its `segments` run, from token `skip` on.
        reverse: see `walk`.
        skip: a multiple of a segment.
    """
    sizes = sizes_of(given)
    x, _, _, B = tensors
    any_state = given.state
    walk[how.segments * given.heads, triton.cdiv(given.x.shape[3], sizes["BP"])](
        *tensors,
        any_state if first is None else first,
        any_state if every is None else every,
        any_state if last is None else last,
        any_state if total is None else total,
        given.x.shape[1], how.segment, given.heads, skip, *strides_of(x, B),
        **sizes, L=how.chunk, MODE=how.mode, REVERSE=reverse,
        FROM_ZERO=first is None, EVERY=every is not None, LAST=last is not None, num_warps=4,
    )  # fmt: skip


def sizes_of(given: Operands) -> dict[str, Any]:
    h, p, n = given.state.shape[1:]
    return {
        "H": h,
        "R": h // given.B.shape[2],
        "P": p,
        "N": n,
        "BP": min(32, tile(p)),
        "BN": tile(n),
    }


def strides_of(*tensors: Tensor) -> list[int]:
    """Distances of rows and of tokens."""
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]
