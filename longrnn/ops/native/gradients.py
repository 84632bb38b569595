"""Gradients of what the C++ kernels compute, from values that the forward pass kept."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from longrnn.ops.native import KINDS, SEGMENT, Weights, call
from longrnn.ops.native.scan import Scan, Sizes, readable_tokens, scan_arguments


class ScanGradients(NamedTuple):
    """Gradients of the arguments of `longrnn.ops.native.scan.scan`, in their shapes."""

    x: Tensor
    gain: Tensor
    log_decay: Tensor
    B: Tensor
    C: Tensor
    state: Tensor


def scan_gradients(
    tensors: tuple[Tensor, ...], kept: Tensor, grad_y: Tensor, grad_final: Tensor | None
) -> ScanGradients:
    """The gradients of `scan`, all tensors in one dtype.

    Args:
        tensors: the arguments of `scan`, in their order.
        kept: what `scan` wrote.
        grad_y: `(b, t, h, p)`.
        grad_final: of the state after the last token; None for 0.
    """
    given, grad_y = readable_tokens(tensors), grad_y.contiguous()
    found = ScanGradients(*(part.new_empty(part.shape) for part in given))
    if grad_final is not None:
        grad_final = grad_final.contiguous()
    sizes = Sizes(*found.x.shape, *found.B.shape[2:])
    steps = (sizes.h * sizes.p, sizes.g * sizes.n)
    arguments = _ScanGradient(
        scan_arguments(given, None, None, kept),
        grad_y.data_ptr(), _address(grad_final),
        found.x.data_ptr(), sizes.t * steps[0], steps[0], 0,
        found.gain.data_ptr(), found.log_decay.data_ptr(),
        found.B.data_ptr(), found.C.data_ptr(), sizes.t * steps[1], steps[1],
        found.state.data_ptr(),
    )  # fmt: skip
    call(f"longrnn_scan_gradient_{KINDS[kept.dtype][0]}", arguments)
    return found


class CellInputs(NamedTuple):
    """The tensors that `longrnn.ops.native.cell` takes, and their gradients.

    Attributes:
        projected: `(b, t, h p + c + h)`.
        weights: see `Weights`.
        conv: `(b, k − 1, c)`.
        state: `(b, h, p, n)`.
    """

    projected: Tensor
    weights: Weights
    conv: Tensor
    state: Tensor

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of them, in the order in which the kernel takes them."""
        return self.projected, *self.weights, self.conv, self.state


def cell_gradients(
    inputs: CellInputs,
    kept: tuple[Tensor, Tensor],
    grad_y: Tensor,
    grad_conv: Tensor | None,
    grad_state: Tensor | None,
    *,
    groups: int,
    norm_eps: float,
    dt_limit: tuple[float, float],
) -> tuple[Tensor | None, ...]:
    """The gradients of `cell`, all tensors in one dtype, in the order of `CellInputs.tensors`.

    Args:
        inputs: of `cell`.
        kept: what `cell` wrote.
        grad_y: `(b, t, h p)`.
        grad_conv: of the last inputs of the convolution; None for 0.
        grad_state: of the state after the last token; None for 0.
        groups: and the next two arguments are those of `cell`.
    """
    b, h, p, n = inputs.state.shape
    given = [None if one is None else one.contiguous() for one in inputs.tensors]
    found = [None if one is None else one.new_empty(one.shape) for one in given]
    outputs = [None if one is None else one.contiguous() for one in (grad_y, grad_conv, grad_state)]
    kind, real = KINDS[inputs.state.dtype]
    # Per token: the convolution's output and its gradient, that of the recurrence, and five numbers
    # per head. A tensor, so that measurements of memory see it.
    channels = inputs.conv.shape[2]
    work = inputs.state.new_empty(grad_y.shape[0] * grad_y.shape[1], 2 * channels + (p + 5) * h)
    arguments = _cell_gradient_type(real)(
        b, inputs.projected.shape[1], h, p, groups, n, inputs.weights.conv_weight.shape[-1], groups,
        norm_eps, *dt_limit,
        *(_address(one) for one in (*given, *kept)), SEGMENT,
        *(_address(one) for one in (*outputs, *found, work)),
    )  # fmt: skip
    call(f"longrnn_cell_gradient_{kind}", arguments)
    return tuple(found)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class _ScanGradient(ctypes.Structure):
    _fields_ = [
        ("of", Scan),
        ("y", ctypes.c_void_p), ("final_state", ctypes.c_void_p),
        ("x", ctypes.c_void_p), ("x_row", ctypes.c_long), ("x_token", ctypes.c_long),
        ("adds_x", ctypes.c_long),
        ("gain", ctypes.c_void_p), ("log_decay", ctypes.c_void_p),
        ("B", ctypes.c_void_p), ("C", ctypes.c_void_p),
        ("bc_row", ctypes.c_long), ("bc_token", ctypes.c_long), ("state", ctypes.c_void_p),
    ]  # fmt: skip


@cache
def _cell_gradient_type(real: Any) -> type[ctypes.Structure]:
    tensors = ("projected", *Weights._fields, "conv", "state")
    pointers = (*tensors, "scanned", "kept")
    gradients = ("y", "conv_after", "state_after", *tensors)
    fields = [
        *((name, ctypes.c_long) for name in (*"bthpgnk", "norm_groups")),
        *((name, real) for name in ("norm_eps", "dt_least", "dt_largest")),
        *((name, ctypes.c_void_p) for name in pointers), ("segment", ctypes.c_long),
        *((f"grad_{name}", ctypes.c_void_p) for name in gradients), ("work", ctypes.c_void_p),
    ]  # fmt: skip
    return type("_CellGradient", (ctypes.Structure,), {"_fields_": fields})
