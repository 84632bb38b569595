"""Switches off what would round a recurrent state: autocast, and TF32 in cuDNN and cuBLAS."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

NO_CHANGE: AbstractContextManager[None] = nullcontext()
# The setting of products of matrices on a GPU, and its value for float32, by the version of torch.
CUBLAS = torch.backends.cuda.matmul
TF32, EXACT = (
    ("fp32_precision", "ieee") if hasattr(CUBLAS, "fp32_precision") else ("allow_tf32", False)
)


def own_precision(like: Tensor) -> AbstractContextManager[object]:
    """A context in which operations run in the dtypes of their tensors.

    Autocast would compute the matrix products of a recurrence with 8 or 11 bits, and so would TF32,
    which `torch.set_float32_matmul_precision("high")` switches on for a GPU. A state that is
    rounded like this at every chunk or token loses its memory, and depends on the split.

    Args:
        like: any tensor of the computation; only its device is used.
    """
    autocast = without_autocast(like)
    rounds = like.device.type == "cuda" and getattr(CUBLAS, TF32) not in (EXACT, "none")
    return _without_tf32(autocast) if rounds else autocast


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast is off on the device of a tensor, and TF32 as it is set."""
    return torch.autocast(like.device.type, enabled=False) if autocasts(like) else NO_CHANGE


@contextmanager
def _without_tf32(inner: AbstractContextManager[object]) -> Iterator[None]:
    """`inner`, in which products of float32 matrices on a GPU are those of float32."""
    before = getattr(CUBLAS, TF32)
    setattr(CUBLAS, TF32, EXACT)
    try:
        with inner:
            yield
    finally:
        setattr(CUBLAS, TF32, before)


def autocasts(like: Tensor) -> bool:
    """Whether autocast is enabled on the device of a tensor; false where a device has none."""
    kind = like.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def product_dtype(like: Tensor) -> torch.dtype:
    """The dtype of the factors of products with a tensor: that of autocast, if it is enabled.

    Autocast leaves float64 as it is.
    """
    if not autocasts(like) or like.dtype == torch.float64:
        return like.dtype
    return torch.get_autocast_dtype(like.device.type)


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
