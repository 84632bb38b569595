"""Fused GPU kernels in Triton. Importing this package does not import triton.

`missing()` says why the kernels cannot run on this machine. The modules beside this one import
triton, and are imported where a kernel runs for the first time.

The environment variable TRITON_INTERPRET=1 makes Triton run kernels on the CPU, one program at a
time, if it is set before triton is imported. That is for tests: it is thousands of times slower.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import Parameter

from longrnn.errors import UserError
from longrnn.ops.transforms import is_transformed


@cache
def interpreting() -> bool:
    """Whether kernels run on the CPU in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def available() -> bool:
    """Whether this machine can run the kernels."""
    return missing() is None


def missing() -> str | None:
    """Why the kernels cannot run, and what to do; None if they can."""
    if not _installed():
        return "Triton is not installed: pip install triton"
    if not (interpreting() or torch.cuda.is_available()):
        return "torch finds no CUDA device for the Triton kernels: use a machine with an NVIDIA GPU"
    return None


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def require() -> None:
    """Raises `UserError` if the kernels cannot run on this machine."""
    if (why := missing()) is not None:
        raise UserError(f"{why}; or leave out backend")


def suits(tensors: Iterable[Tensor | None]) -> bool:
    """Whether the kernels may read these tensors: plain ones on one device that the kernels run on.

    They may not while torch records the operations: see `is_transformed`.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    return (
        device.type == ("cpu" if interpreting() else "cuda")
        and all(one.device == device and type(one) in (Tensor, Parameter) for one in given)
        and not is_transformed()
    )


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which kernels start on the device of a tensor, whatever device is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def readable(tensor: Tensor) -> Tensor:
    """A tensor as kernels may load it: the interpreter computes wrong numbers from bfloat16."""
    return tensor.float() if interpreting() and tensor.dtype == torch.bfloat16 else tensor


def runs(fused: bool | None, *tensors: Tensor | None) -> bool:
    """Whether a fused kernel computes an operation, rather than torch's operators.

    Args:
        fused: whether the caller wants it; None for no, because no GPU has run the kernels yet.
        tensors: of the operation; the first one is not None.
    """
    return bool(fused) and available() and suits(tensors)
