"""Everything between the two projections of a Mamba-2 as one operation, in C++ on a CPU.

Notable choices:
- The backward pass keeps the input, the output of the recurrence and one state per segment, and
  computes the convolution and the other states again.
- The result is None where the kernels cannot compute it; the mixer then computes each part alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops import native as kernels
from longrnn.ops.again import gradients_of
from longrnn.ops.conv import causal_conv
from longrnn.ops.native import Weights
from longrnn.ops.native.gradients import CellInputs, cell_gradients
from longrnn.ops.native.scan import segments_of
from longrnn.ops.norm import gated_rms_norm
from longrnn.ops.ssd import ScanInputs, chunked


class CellOptions(NamedTuple):
    """`groups` of B, C and the norm; `norm_eps`, added to the mean square; `dt_limit`, the least
    and the largest dt."""

    groups: int
    norm_eps: float
    dt_limit: tuple[float, float]


class CellOutputs(NamedTuple):
    """`y` `(b, t, h p)`, and the states of convolution and recurrence after the last token."""

    y: Tensor
    conv: Tensor
    state: Tensor


def fused_cell(inputs: CellInputs, options: CellOptions) -> CellOutputs | None:
    """Computes the cell in C++; None where C++ cannot compute it, as on other devices."""
    projected, weights, _, state = inputs
    if not kernels.cell_suits(*inputs):
        return None
    given = [one for one in inputs.tensors if one is not None]
    if not kernels.tracked(given):
        return CellOutputs(*kernels.cell(*inputs, **options._asdict()))
    kept = (
        state.new_empty(*projected.shape[:2], weights.D.shape[0] * state.shape[2]),
        state.new_empty(segments_of(projected.shape[1]), *state.shape),
    )
    with torch.no_grad():
        found = kernels.cell(*inputs, **options._asdict(), kept=kept)
    return CellOutputs(*_Cell.apply(found, kept, options, *inputs.tensors))


def _parts(inputs: CellInputs, options: CellOptions) -> CellOutputs:
    """The same in differentiable operations, for second derivatives."""
    projected, weights, conv, state = inputs
    h, p, n = state.shape[1:]
    z, xBC, dt = projected.split([h * p, conv.shape[2], h], dim=-1)
    xBC, conv = causal_conv(
        xBC, weights.conv_weight[:, 0], weights.conv_bias, conv, activation=True
    )
    x, B, C = xBC.split([h * p, options.groups * n, options.groups * n], dim=-1)
    x = x.unflatten(-1, (h, p))
    B, C = (one.unflatten(-1, (options.groups, n)) for one in (B, C))
    dt = F.softplus(dt + weights.dt_bias).clamp(*options.dt_limit)
    scan = ScanInputs(x, dt, dt * -weights.A_log.exp(), B, C)
    y, state = chunked.ssd(scan, state)
    y = (y + x * weights.D[:, None]).flatten(2)
    y = gated_rms_norm(y, z, weights.norm_weight, options.norm_eps, options.groups)
    return CellOutputs(y, conv, state)


class _Cell(torch.autograd.Function):
    """What `kernels.cell` computed, with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        found: tuple[Tensor, Tensor, Tensor],
        kept: tuple[Tensor, Tensor],
        options: CellOptions,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The output of the recurrence needs no more digits than the result has.
        ctx.save_for_backward(*tensors, kept[0].to(found[0].dtype), kept[1])
        ctx.options = options
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *tensors, scanned, kept = ctx.saved_tensors
        if grad_y is None and all(one is None for one in grads):
            return (None,) * (3 + len(tensors))
        if torch.is_grad_enabled():

            def run(*tensors: Tensor) -> tuple[Tensor, ...]:
                return _parts(_inputs(tensors), ctx.options)

            wants = ctx.needs_input_grad[3:]
            return None, None, None, *gradients_of(run, tensors, wants, (grad_y, *grads))
        if grad_y is None:
            grad_y = torch.zeros_like(scanned)
        dtype = kept.dtype
        inputs, outputs = _in_dtype(tensors, dtype), _in_dtype((scanned, grad_y, *grads), dtype)
        found = cell_gradients(
            _inputs(inputs), (outputs[0], kept), *outputs[1:], **ctx.options._asdict()
        )
        pairs = zip(found, tensors, strict=True)
        own = [None if grad is None else grad.to(one.dtype) for grad, one in pairs]
        return None, None, None, *own


def _in_dtype(tensors: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    return [None if one is None else one.to(dtype) for one in tensors]


def _inputs(tensors: Any) -> CellInputs:
    projected, *weights, conv, state = tensors
    return CellInputs(projected, Weights(*weights), conv, state)
