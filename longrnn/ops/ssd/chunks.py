"""Chunks of a scan's inputs: cutting, filling, stacking and joining them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.ops.ssd.base import ScanInputs
from longrnn.state import tree_map


class Chunk(NamedTuple):
    """Inputs of one chunk of t slots; slots that are not filled yet are 0.

    Attributes:
        x: `(b, t, h, p)`.
        gain: `(b, t, h)`.
        log_decay: `(b, t, h)`.
        B: `(b, t, g, n)`.
    """

    x: Tensor
    gain: Tensor
    log_decay: Tensor
    B: Tensor


class Stack(NamedTuple):
    """Inputs of m chunks.

    Attributes:
        u: gain · x, `(b, m, j, h, p)`.
        log_decay: `(b, m, j, h)`.
        B: `(b, m, g, j, n)`.
    """

    u: Tensor
    log_decay: Tensor
    B: Tensor


def cut(inputs: ScanInputs, length: int, like: Chunk) -> list[Chunk]:
    """Cuts inputs into whole chunks, in the dtypes of `like`."""
    pairs = zip(inputs[:4], like, strict=True)
    parts = [tensor.to(one.dtype).split(length, dim=1) for tensor, one in pairs]
    return [Chunk(*tensors) for tensors in zip(*parts, strict=True)]


def fill(chunk: Chunk, inputs: ScanInputs, offset: int) -> Chunk:
    """A chunk with the tokens of `inputs` in the slots from `offset` on."""
    new = Chunk(*inputs[:4])
    end = offset + new.x.shape[1]
    return tree_map(
        lambda old, more: torch.cat([old[:, :offset], more.to(old.dtype), old[:, end:]], dim=1),
        chunk,
        new,
    )


def stack(chunks: list[Chunk], last: int, dtype: torch.dtype) -> Stack:
    """Stacks the first `last` tokens of chunks, in `dtype` but for log_decay."""
    x, gain, log_decay, B = (
        torch.stack(tensors, dim=1)[:, :, :last] for tensors in zip(*chunks, strict=True)
    )
    u = x.to(dtype) * gain.to(dtype)[..., None]
    return Stack(u, log_decay, B.to(dtype).transpose(2, 3))


def join(left: Stack, right: Stack) -> Stack:
    """Concatenates stacked chunks along time, pair by pair."""
    u, log_decay = (torch.cat(pair, dim=2) for pair in zip(left[:2], right[:2], strict=True))
    return Stack(u, log_decay, torch.cat([left.B, right.B], dim=3))
