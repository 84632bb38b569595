"""Caches a value that depends on all weights until a weight changes.

Notable choices:
- PyTorch counts the in-place changes of every tensor. That count, the address and the layout of
  each weight are compared. The cache keeps a reference to the weights, so that no other weight can
  get the same address.
- PyTorch does not count writes through `.data` or NumPy. They are found by comparing entries: all
  of a small weight (rates, step biases, norms), and PROBED evenly spaced ones of a large weight. An
  uncounted write that changes only other entries of a large weight is not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

SMALL = 1024
PROBED = 256


class Snapshot(NamedTuple):
    """The weights at one time.

    Attributes:
        marks: address, count of changes, shape, strides and dtype of each weight.
        views: the compared entries of each weight, in its own memory.
        entries: a copy of `views`, grouped by device and dtype.
    """

    marks: list[tuple[object, ...]]
    views: list[Tensor]
    entries: list[Tensor]


class CachedValue(Generic[T]):
    """The last value that was computed from weights. A copy of this object is empty."""

    def __init__(self) -> None:
        self._last: tuple[Snapshot, T] | None = None

    def __reduce__(self) -> tuple[type[CachedValue[T]], tuple[()]]:
        return type(self), ()

    @torch.no_grad()
    def get(self, weights: Iterable[Tensor], compute: Callable[[], T]) -> T:
        """Returns `compute()`, or its last result if no weight has changed since."""
        # Transforms of torch.func wrap weights and results while they run.
        tensors = [torch.func.debug_unwrap(weight) for weight in weights]
        marks = [_mark(tensor) for tensor in tensors]
        if self._last is not None:
            seen, value = self._last
            if seen.marks == marks and _same(_entries(seen.views), seen.entries):
                return value
        views = [torch.func.debug_unwrap(_probe(tensor.detach())) for tensor in tensors]
        value = compute()
        self._last = Snapshot(marks, views, _entries(views)), value
        return value


def _mark(tensor: Tensor) -> tuple[object, ...]:
    """See `Snapshot.marks`."""
    # Inference tensors have no count.
    count = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), count, tensor.shape, tensor.stride(), tensor.dtype


def _probe(tensor: Tensor) -> Tensor:
    """The entries of a weight to compare, as a one-dimensional view of it."""
    if not tensor.is_contiguous():
        return tensor[(0,) * (tensor.ndim - 1)]
    flat = tensor.view(-1)
    return flat if len(flat) <= SMALL else flat[:: len(flat) // PROBED]


def _entries(views: list[Tensor]) -> list[Tensor]:
    """See `Snapshot.entries`."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for view in views:
        groups.setdefault((view.device, view.dtype), []).append(view)
    return [torch.func.debug_unwrap(torch.cat(group)) for group in groups.values()]


def _same(now: list[Tensor], then: list[Tensor]) -> bool:
    """Whether tensors are equal bit for bit, so that a NaN equals itself."""
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(now, then, strict=True)
    )
