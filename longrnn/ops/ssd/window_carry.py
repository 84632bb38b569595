"""What a sliding window remembers: the last chunks of inputs, and two stacks of chunk states.

A state takes as much memory as the inputs of a few hundred tokens: longer chunks need less memory,
and more products per token. Each call reads the length of the chunks from its carry.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.ops.ssd.base import ScanInputs
from longrnn.ops.ssd.chunks import Chunk

CHUNK = 64


class WindowCarry(NamedTuple):
    """What a window of `WindowShape` remembers.

    Attributes:
        phase: `(b,)` int64, number of tokens consumed, modulo the length of a block.
        current: the chunk that is being filled.
        recent: the `whole + 1` complete chunks before it, oldest first.
        totals: `(b, whole + 1, h)` float64, the log decay of each of them.
        front: `between` states `(b, h, p, n)`. A slot that the current block has reached holds the
            state of that chunk alone; the others hold sums from that chunk to the end of the
            previous block.
        back: `(b, h, p, n)`, the sum over the current block.
        back_decay: `(b, h)` float64, its log decay.
    """

    phase: Tensor
    current: Chunk
    recent: tuple[Chunk, ...]
    totals: Tensor
    front: tuple[Tensor, ...]
    back: Tensor
    back_decay: Tensor


class WindowShape(NamedTuple):
    """How a window is cut into chunks: window = whole · chunk + rest, in tokens."""

    window: int
    chunk: int
    whole: int
    rest: int

    @property
    def between(self) -> int:
        """K, how many chunks lie inside the window of every token."""
        return self.whole - 1

    @property
    def block(self) -> int:
        """Tokens per block of K chunks, after which the phase restarts at 0."""
        return max(1, self.between) * self.chunk


def shape_of(window: int, chunk: int | None = None) -> WindowShape:
    """Cuts a window of at least one token into chunks, of CHUNK tokens by default."""
    chunk = min(CHUNK, window) if chunk is None else chunk
    return WindowShape(window, chunk, window // chunk, window % chunk)


def shape_in(carry: WindowCarry, window: int) -> WindowShape:
    """How the window of a carry is cut."""
    return shape_of(window, carry.current.x.shape[1])


def init_carry(
    like: ScanInputs, state: Tensor, window: int, chunk: int | None = None
) -> WindowCarry:
    """The carry before the first token.

    Args:
        like: inputs of one token without the batch axis; only shapes and dtypes are used.
        state: `(b, h, p, n)`; only its shape, device and dtype are used.
        window: in tokens, at least 1.
        chunk: tokens per chunk, at most `window`; None for CHUNK.
    """
    shape, rows = shape_of(window, chunk), len(state)

    def slots(tensor: Tensor) -> Tensor:
        return torch.zeros(
            rows, shape.chunk, *tensor.shape[1:], dtype=tensor.dtype, device=state.device
        )

    # One chunk of zeros serves as all of them, because chunks are never changed in place.
    empty = Chunk(*(slots(tensor) for tensor in like[:4]))
    wide = {"dtype": torch.float64, "device": state.device}
    return WindowCarry(
        phase=torch.zeros(rows, dtype=torch.long, device=state.device),
        current=empty,
        recent=(empty,) * (shape.whole + 1),
        totals=torch.zeros(rows, shape.whole + 1, state.shape[1], **wide),
        front=(torch.zeros_like(state),) * shape.between,
        back=torch.zeros_like(state),
        back_decay=torch.zeros(rows, state.shape[1], **wide),
    )
