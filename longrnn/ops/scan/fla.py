"""The recurrence by kernels of flash-linear-attention, in float32; see `longrnn.ops.gpu`.

The kernels need B and C per head, which takes h / g times their memory. With gradients, these
copies are not kept: the backward pass computes the call again. So it does not keep y either, which
a window changes in place.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from longrnn.ops import gpu
from longrnn.ops.scan.definition import ScanInputs, reversible
from longrnn.ops.transforms import recomputed

BY_HEAD = "fla.ops.simple_gla"


def refusal(inputs: ScanInputs, state: Tensor | None = None, *others: Any) -> str | None:
    """Why the kernels cannot compute this call; None if they can."""
    if inputs.has_key_decays:
        return "its keys have decays of their own"
    return gpu.refusal((*inputs, state), BY_HEAD, *gpu.FLA_PACKAGES)


@reversible
def scan(
    inputs: ScanInputs, state: Tensor | None = None, *, final: bool = True
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.definition.scan`; in float32."""
    return gpu.once_differentiable(*recomputed(_scan, inputs, state, final))


def _scan(inputs: ScanInputs, state: Tensor | None, final: bool) -> tuple[Tensor, Tensor]:
    x, gain, log_decay, B, C = inputs.to(torch.float32)
    simple_gla = import_module(BY_HEAD)
    few = gpu.fla_takes_few(x)
    kernel = simple_gla.fused_recurrent_simple_gla if few else simple_gla.chunk_simple_gla
    y, after = kernel(
        q=inputs.per_head(C),
        k=inputs.per_head(B),
        v=x * gain[..., None],
        g=log_decay.clamp(min=gpu.LEAST_GPU_LOG_DECAY),
        scale=1.0,
        initial_state=None if state is None else state.mT,
        output_final_state=final,
    )
    return y, y if after is None else after.mT
