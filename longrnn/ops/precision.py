"""Autocast is switched off where it would change what a recurrence remembers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

OFF: AbstractContextManager[None] = nullcontext()


def own_precision(like: Tensor) -> AbstractContextManager[object]:
    """A context in which operations run in the dtype of their tensors, also under autocast.

    Autocast would run the matrix products of a recurrence in 8 or 11 bits beside sums in float32.
    A state that is rounded so at every chunk or token loses its memory, and differs with the split.

    Args:
        like: any tensor of the computation, for its device.
    """
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else OFF
