"""Memory for states, used again as soon as no tensor has it.

The state after a token is written to other memory than the state before, because states are values.
For new memory the operating system clears pages, and it takes back those of freed tensors. At the
sizes of a 130m model this took a fifth of the time per token (`benchmarks/results/peers_cpu.md`).
"""

from __future__ import annotations

import weakref
from math import prod

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, one line of a cache


class Recycled:
    """Gives out sets of float32 tensors, and keeps the memory of one set that was freed.

    A set is freed with the last tensor, or view of one, of its memory.
    """

    def __init__(self) -> None:
        self._spare: list[np.ndarray] = []
        # References that are not kept never call back.
        self._lent: dict[int, tuple[weakref.ref[_Owner], np.ndarray]] = {}

    def take(self, count: int, shape: tuple[int, ...]) -> list[Tensor]:
        """`count` contiguous tensors of a shape, with undefined values and own storages."""
        memory = self._memory((count, *shape))
        owner = _Owner()
        reference = weakref.ref(owner, self._return)
        self._lent[id(reference)] = reference, memory
        return [torch.from_numpy(_Part.of(part, owner)) for part in memory]

    def _memory(self, shape: tuple[int, ...]) -> np.ndarray:
        try:
            found = self._spare.pop()  # atomic, for several threads
        except IndexError:
            return _aligned(shape)
        return found if found.shape == shape else _aligned(shape)

    def _return(self, reference: weakref.ref[_Owner]) -> None:
        _, memory = self._lent.pop(id(reference))
        self._spare[:] = [memory]


class _Owner:
    """Lives as long as some part of a set."""


class _Part(np.ndarray):
    """An array that a tensor keeps alive, and that keeps the owner of its memory alive."""

    owner: _Owner

    @classmethod
    def of(cls, part: np.ndarray, owner: _Owner) -> _Part:
        own = part.view(cls)
        own.owner = owner
        return own


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """New memory; numpy asks for large pages where it is large."""
    size = prod(shape) * np.dtype(np.float32).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(np.float32).reshape(shape)
