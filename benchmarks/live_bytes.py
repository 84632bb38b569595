"""The largest number of bytes that tensors hold at a time, counted from the operations of torch.

The count is the same in every run, unlike the resident memory of a process, which depends on the
allocator. Memory that an operation uses only inside its kernel is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations create inside this context.

    Attributes:
        now: bytes of those that are alive.
        peak: the largest `now` so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def known(self, *tensors: Tensor) -> None:
        """Leaves out storages that existed before, and counts them when they are replaced."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)
