"""Switches off what would round a recurrent state: autocast, and the TF32 of cuDNN."""

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
    return torch.autocast(like.device.type, enabled=False) if autocasts(like) else OFF


def autocasts(like: Tensor) -> bool:
    """Whether autocast is enabled on the device of a tensor; false where a device has none."""
    kind = like.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def refuse_tf32(like: Tensor) -> None:
    """Makes cuDNN compute float32 in float32, from now on and for the whole process.

    By default cuDNN rounds the factors of float32 products to 11 significant bits (TF32), also
    inside its recurrent cells. The setting is read by the backward pass too, which runs after the
    call, so it is not restored.

    Args:
        like: any tensor of the computation; nothing happens if it is on the CPU.
    """
    if like.device.type == "cpu":
        return
    cudnn = torch.backends.cudnn
    cudnn.allow_tf32 = False
    if hasattr(cudnn, "rnn"):
        # From torch 2.9 on, the line above means the precision of `torch.backends.fp32_precision`,
        # which may be TF32. Both operators, or reading `allow_tf32` would raise from now on.
        cudnn.rnn.fp32_precision = cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
