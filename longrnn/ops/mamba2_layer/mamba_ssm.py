"""A Mamba-2 layer with the recurrence of mamba-ssm, which takes dt and A; see `longrnn.ops.gpu`."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from longrnn.ops import gpu
from longrnn.ops.conv.definition import ConvState
from longrnn.ops.mamba2_layer.definition import Parts, Weights, after, before
from longrnn.ops.scan.decays import Decay
from longrnn.ops.scan.definition import FEW, ScanInputs, scan

MODULE, REQUIREMENT = "mamba_ssm.ops.triton.ssd_combined", "mamba-ssm>=2.2.2"
# Tokens per chunk, the default of mamba-ssm, and the first offset that does not fit into the 32
# bits of its kernels, which would read other numbers without an error (state-spaces/mamba#1015).
MAMBA_SSM_CHUNK, OFFSETS = 256, 2**31


def refusal(projected: Tensor, weights: Weights, state: ConvState) -> str | None:
    """Why mamba-ssm cannot compute this call; None if it can."""
    return gpu.refusal((projected, *weights.tensors().values(), *state), MODULE, REQUIREMENT)


def layer(projected: Tensor, weights: Weights, state: ConvState) -> tuple[Tensor, ConvState]:
    """See `longrnn.ops.mamba2_layer.definition.layer`."""
    parts = before(projected, weights, state, "torch")
    y, ssm = recurrence(parts, state.ssm)
    return after(y, parts, "torch"), ConvState(parts.conv, ssm)


def recurrence(parts: Parts, state: Tensor) -> tuple[Tensor, Tensor]:
    """y `(b, t, h, p)` and the state after the last token; few tokens, and too many, by `scan`."""
    x, dt, A, B, C = parts.x, parts.dt, parts.A, parts.B, parts.C
    (rows, time, h, p), (g, n) = x.shape, B.shape[2:]
    # Per token: x, B per head, the states of chunks, C Bᵀ within chunks, and gradients of decays.
    largest = max(h * p, h * n, h * p * n // MAMBA_SSM_CHUNK, g * MAMBA_SSM_CHUNK, 8 * h)
    if time <= FEW or rows * (time + MAMBA_SSM_CHUNK) * largest >= OFFSETS:
        return scan(ScanInputs(x, dt, Decay(dt, A), B, C), state)
    x, dt, B, C = (tensor.float().contiguous() for tensor in (x, dt, B, C))
    y, final = import_module(MODULE).mamba_chunk_scan_combined(
        x, dt, A, B, C, MAMBA_SSM_CHUNK, initial_states=state, return_final_states=True
    )
    return gpu.once_differentiable(y, final)
