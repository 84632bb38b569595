"""The recurrence by kernels of flash-linear-attention, in float32; see `longrnn.ops.gpu`.

Where tokens do not erase, the kernels need B and C per head, which takes h / g times their memory.
With gradients, these copies are not kept: the backward pass computes the call again. So it does not
keep y either, which a window changes in place.
"""

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from longrnn.ops import gpu
from longrnn.ops.cpu.checks import tracked
from longrnn.ops.scan.inputs import ScanInputs
from longrnn.ops.transforms import recomputed

# Modules, and the last words of their kernels' names, by whether tokens erase and whether decays
# are per key.
FLA_KERNELS = {
    (False, False): ("fla.ops.simple_gla", "simple_gla"),
    (False, True): ("fla.ops.gla", "gla"),
    (True, False): ("fla.ops.gated_delta_rule", "gated_delta_rule"),
    (True, True): ("fla.ops.kda", "kda"),
}
# The most keys of `chunk_kda`.
MAX_KEYS = 256


def refusal(
    inputs: ScanInputs, state: Tensor | None = None, *others: Any, erases: bool = False
) -> str | None:
    """Why the kernels cannot compute this call; None if they can."""
    module, _ = FLA_KERNELS[erases, inputs.has_key_decays]
    channels, keys = inputs.x.shape[3], inputs.B.shape[3]
    if erases and keys > MAX_KEYS:
        return f"it has at most {MAX_KEYS} keys per head, and this layer has {keys}"
    if not erases and inputs.has_key_decays and channels == 1:
        return "its heads have one channel"
    return gpu.refusal((*inputs.tensors(), state), module, *gpu.FLA_PACKAGES)


def scan(
    inputs: ScanInputs, state: Tensor | None = None, *, final: bool = True, erases: bool = False
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.definition.scan`; in float32."""
    # The kernels of the delta rule for few tokens have no gradients.
    is_recurrent = not (erases and tracked((*inputs.tensors(), state)))
    kind = "fused_recurrent" if gpu.fla_takes_few(inputs.x) and is_recurrent else "chunk"
    run = _run if erases else partial(recomputed, _run)
    return gpu.once_differentiable(*run(kind, inputs, state, final, erases))


def _run(
    kind: str, inputs: ScanInputs, state: Tensor | None, final: bool, erases: bool
) -> tuple[Tensor, Tensor]:
    """The results of a kernel of a kind."""
    x, gain, decay, B, C = inputs.to(torch.float32)
    module, name = FLA_KERNELS[erases, decay.is_per_key]
    given = {"q": C, "k": B, "v": x, "beta": gain}
    if not erases:
        given = {"q": inputs.per_head(C), "k": inputs.per_head(B), "v": x * gain[..., None]}
    kernel = f"{kind}_{name}"
    given["gk" if kernel == "fused_recurrent_gla" else "g"] = decay.log().clamp(
        min=gpu.LEAST_GPU_LOG_DECAY
    )
    y, after = getattr(import_module(module), kernel)(
        **given,
        scale=1.0,
        initial_state=None if state is None else state.mT.contiguous(),
        output_final_state=final,
    )
    return y, y if after is None else after.mT
