"""The recurrence by kernels of flash-linear-attention, in float32; see `longrnn.ops.gpu`.

The kernels need B and C per head, which takes h / g times their memory. With gradients, these
copies are not kept: the backward pass computes the call again. So it does not keep y either, which
a window changes in place.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from longrnn.ops import gpu
from longrnn.ops.scan.inputs import ScanInputs
from longrnn.ops.transforms import recomputed

# Decays per head, and per key.
BY_HEAD, BY_KEY = "fla.ops.simple_gla", "fla.ops.gla"


def refusal(inputs: ScanInputs, state: Tensor | None = None, *others: Any) -> str | None:
    """Why the kernels cannot compute this call; None if they can."""
    by_key = inputs.has_key_decays
    if by_key and inputs.x.shape[3] == 1:
        return "its heads have one channel"
    return gpu.refusal((*inputs.tensors(), state), BY_KEY if by_key else BY_HEAD, *gpu.FLA_PACKAGES)


def scan(
    inputs: ScanInputs, state: Tensor | None = None, *, final: bool = True
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.definition.scan`; in float32."""
    return gpu.once_differentiable(*recomputed(_scan, inputs, state, final))


def _scan(inputs: ScanInputs, state: Tensor | None, final: bool) -> tuple[Tensor, Tensor]:
    x, gain, of_decay, B, C = inputs.to(torch.float32)
    heads, decay = x.shape[2], of_decay.log().clamp(min=gpu.LEAST_GPU_LOG_DECAY)
    given = {
        "q": C.repeat_interleave(heads // C.shape[2], 2),
        "k": B.repeat_interleave(heads // B.shape[2], 2),
        "v": x * gain[..., None],
        "scale": 1.0,
        "initial_state": None if state is None else state.mT,
        "output_final_state": final,
    }
    few = gpu.fla_takes_few(x)
    if decay.ndim == 3:
        simple_gla = import_module(BY_HEAD)
        kernel = simple_gla.fused_recurrent_simple_gla if few else simple_gla.chunk_simple_gla
        y, after = kernel(g=decay, **given)
    elif few:
        y, after = import_module(BY_KEY).fused_recurrent_gla(gk=decay, **given)
    else:
        y, after = import_module(BY_KEY).chunk_gla(g=decay, **given)
    return y, y if after is None else after.mT
