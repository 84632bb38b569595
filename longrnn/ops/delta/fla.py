"""The gated delta rule by kernels of flash-linear-attention, in float32; see `longrnn.ops.gpu`."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from longrnn.ops import gpu
from longrnn.ops.cpu.checks import tracked
from longrnn.ops.scan.inputs import ScanInputs

# Modules, and the last words of their kernels' names; decays per head, and per key.
HEAD_KERNEL = ("fla.ops.gated_delta_rule", "gated_delta_rule")
KEY_KERNEL = ("fla.ops.kda", "kda")
# The most keys of `chunk_kda`.
MAX_KEYS = 256


def refusal(inputs: ScanInputs, state: Tensor | None = None, *others: Any) -> str | None:
    """Why the kernels cannot compute this call; None if they can."""
    module, _ = KEY_KERNEL if inputs.has_key_decays else HEAD_KERNEL
    if inputs.B.shape[3] > MAX_KEYS:
        return f"it has at most {MAX_KEYS} keys per head, and this layer has {inputs.B.shape[3]}"
    return gpu.refusal((*inputs.tensors(), state), module, *gpu.FLA_PACKAGES)


def delta(
    inputs: ScanInputs, state: Tensor | None = None, *, final: bool = True
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.delta.definition.delta`; in float32."""
    x, beta, decay, B, C = inputs.to(torch.float32)
    module, name = KEY_KERNEL if decay.is_per_key else HEAD_KERNEL
    # The kernel for few tokens has no gradients.
    few = gpu.fla_takes_few(x) and not tracked((*inputs.tensors(), state))
    kernel = getattr(import_module(module), f"{'fused_recurrent' if few else 'chunk'}_{name}")
    y, after = kernel(
        q=C,
        k=B,
        v=x,
        g=decay.log().clamp(min=gpu.LEAST_GPU_LOG_DECAY),
        beta=beta,
        scale=1.0,
        initial_state=None if state is None else state.mT.contiguous(),
        output_final_state=final,
    )
    return gpu.once_differentiable(y, y if after is None else after.mT)
