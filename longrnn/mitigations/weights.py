"""A value that depends on all weights, computed again only after a weight has changed.

Notable choices:
- Every tensor counts the changes that are made to it in place. That count, the address and the
  layout of each weight are compared. What was seen is held on to, so no other weight can come to
  stand at the same address.
- Writes through `.data` or NumPy are not counted by PyTorch. They are found by comparing entries:
  all of a small weight (rates, step biases, norms), and PROBED of a large one, evenly spaced. A
  write that bypasses the count and changes only other entries of a large weight is not noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

SMALL = 1024
PROBED = 256


class Look(NamedTuple):
    """The weights as they were seen.

    Attributes:
        marks: address, count of changes, shape, strides and dtype of each.
        views: entries of each, in the memory of the weight itself.
        entries: a copy of `views`, by device and dtype.
    """

    marks: list[tuple[object, ...]]
    views: list[Tensor]
    entries: list[Tensor]


class Remembered:
    """The last value that was computed from weights. A copy of this object remembers nothing."""

    def __init__(self) -> None:
        self._look: Look | None = None
        self._value = 0

    def __reduce__(self) -> tuple[type[Remembered], tuple[()]]:
        return type(self), ()

    @torch.no_grad()
    def get(self, weights: Iterable[Tensor], compute: Callable[[], int]) -> int:
        """`compute()`, or what it gave at the last call if no weight has changed since."""
        # Inside a transform of torch.func weights and results are wrapped, for as long as it runs.
        tensors = [torch.func.debug_unwrap(weight) for weight in weights]
        marks = [_mark(tensor) for tensor in tensors]
        seen = self._look
        if seen is None or seen.marks != marks or not _same(_entries(seen.views), seen.entries):
            views = [torch.func.debug_unwrap(_probe(tensor.detach())) for tensor in tensors]
            self._look = Look(marks, views, _entries(views))
            self._value = compute()
        return self._value


def _mark(tensor: Tensor) -> tuple[object, ...]:
    # A tensor of inference mode counts nothing.
    count = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), count, tensor.shape, tensor.stride(), tensor.dtype


def _probe(tensor: Tensor) -> Tensor:
    """Entries of a weight as a view of it, `(n,)`."""
    if not tensor.is_contiguous():
        return tensor[(0,) * (tensor.ndim - 1)]
    flat = tensor.view(-1)
    return flat if len(flat) <= SMALL else flat[:: len(flat) // PROBED]


def _entries(views: list[Tensor]) -> list[Tensor]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for view in views:
        groups.setdefault((view.device, view.dtype), []).append(view)
    return [torch.func.debug_unwrap(torch.cat(group)) for group in groups.values()]


def _same(now: list[Tensor], then: list[Tensor]) -> bool:
    """Bit for bit, so that a NaN equals itself."""
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(now, then, strict=True)
    )
