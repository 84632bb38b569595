"""Switches autocast off where it would change a recurrent state."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

OFF: AbstractContextManager[None] = nullcontext()


def own_precision(like: Tensor) -> AbstractContextManager[object]:
    """A context in which operations run in the dtypes of their tensors, even under autocast.

    Autocast would compute the matrix products of a recurrence with 8 or 11 bits. A state that is
    rounded like this at every chunk or token loses its memory, and depends on the split.

    Args:
        like: any tensor of the computation; only its device is used.
    """
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else OFF
