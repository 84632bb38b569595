"""Which tensors the C++ kernels read. Every limit of a kernel stands here, or in its refusal."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from longrnn.errors import UserError
from longrnn.ops.cpu.library import missing
from longrnn.ops.cpu.signatures import MAX_TAPS
from longrnn.ops.transforms import is_transformed

# Dtypes that the kernels of whole layers and of few rows read as they are.
MIXED = (torch.float32, torch.bfloat16)


def refusal(tensors: Iterable[Tensor | None]) -> str | None:
    """Why the kernels cannot read these tensors; None if they can."""
    if (reason := missing()) is not None:
        return reason
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type != "cpu" or type(tensor) not in (Tensor, Parameter):
            return "its tensors are not plain tensors on the CPU"
        if tensor.shape[:1] == (0,):
            return "its batch has no rows"
    if is_transformed():
        return "torch transforms or records its operations"
    return None


def taps_refusal(taps: int) -> str | None:
    """Why the kernels have no convolution of this width; None if they have."""
    if taps <= MAX_TAPS:
        return None
    return f"the C++ convolution has at most {MAX_TAPS} taps, and this one has d_conv={taps}"


def tracked(tensors: Iterable[Tensor | None]) -> bool:
    """Whether the gradient of some of these tensors is needed."""
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


def refuse_second_derivatives(kernels: str) -> None:
    """Raises a `UserError` in a backward pass that is itself differentiated (create_graph=True)."""
    if torch.is_grad_enabled():
        raise UserError(
            f"the {kernels} kernels have no second derivatives: load the model with backend='torch'"
        )
