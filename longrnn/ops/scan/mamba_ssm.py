"""The recurrence of Mamba-2 by the kernel of mamba-ssm, in float32; see `longrnn.ops.gpu`."""

from importlib import import_module

from torch import Tensor

from longrnn.ops import gpu
from longrnn.ops.scan import definition
from longrnn.ops.scan.definition import FEW
from longrnn.ops.scan.inputs import ScanInputs

MODULE, REQUIREMENT = "mamba_ssm.ops.triton.ssd_combined", "mamba-ssm>=2.2.2"
# Tokens per chunk, the default of mamba-ssm, and the first offset that does not fit into the 32
# bits of its kernels, which would read other numbers without an error (state-spaces/mamba#1015).
MAMBA_SSM_CHUNK, OFFSETS = 256, 2**31


def refusal(inputs: ScanInputs, state: Tensor | None = None) -> str | None:
    """Why mamba-ssm cannot compute this call; None if it can."""
    if inputs.has_key_decays or inputs.decay.rate is None:
        return "it computes decays per head, each of a step and a rate"
    return gpu.refusal((*inputs.tensors(), state), MODULE, REQUIREMENT)


def scan(
    inputs: ScanInputs, state: Tensor | None = None, *, final: bool = True
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.definition.scan`.

    It computes few tokens, too many for the kernel, and calls in which x has a factor other than
    the step of the decay: edited calls, and those with several documents.
    """
    (step, rate, keep), state = inputs.decay, inputs.zero_state() if state is None else state
    (rows, time, h, p), (g, n) = inputs.x.shape, inputs.B.shape[2:]
    # Per token: x, B per head, the states of chunks, C Bᵀ within chunks, and gradients of decays.
    largest = max(h * p, h * n, h * p * n // MAMBA_SSM_CHUNK, g * MAMBA_SSM_CHUNK, 8 * h)
    is_too_large = rows * (time + MAMBA_SSM_CHUNK) * largest >= OFFSETS
    if time <= FEW or is_too_large or inputs.gain is not step or keep is not None:
        return definition.scan(inputs, state, final=final)
    x, dt, B, C = (one.float().contiguous() for one in (inputs.x, step, inputs.B, inputs.C))
    y, after = import_module(MODULE).mamba_chunk_scan_combined(
        x, dt, rate, B, C, MAMBA_SSM_CHUNK, initial_states=state, return_final_states=True
    )
    return gpu.once_differentiable(y, after)
