"""Recurrences by GPU kernels of other libraries: flash-linear-attention and mamba-ssm.

flash-linear-attention takes any log decays; mamba-ssm takes dt and A, that is, layers without edits
and without documents. Both compute in float32. Not yet run on a GPU.

Notable choices:
- Everything is given in float32, also for models in bfloat16. Triton would compute the products in
  TF32, with 11 significant bits. `TRITON_F32_DEFAULT=tf32x3`, which is set where the environment
  sets nothing else, makes three such products of each, with about 22 bits.
- Both libraries add up log decays in float32, `longrnn.ops.scan` in float64. Where strong decays or
  document starts come before slow decays, results differ by up to 1e-5 with flash-linear-attention
  (see `NEVER`), and by some 1e-4 with mamba-ssm.
- flash-linear-attention needs B and C per head, which takes h / g times their memory. With
  gradients, these copies are not kept: the backward pass computes the call again. So it does not
  keep y either, which a window changes in place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version

import torch
from packaging.requirements import Requirement
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longrnn.errors import UserError
from longrnn.files import one_line
from longrnn.ops.scan.definition import FEW, ScanInputs, reversible, scan
from longrnn.ops.transforms import is_transformed

# What is imported, and the packages that it needs. fla-core before 0.6 has 32-bit offsets. With
# Triton before 3.7.1, its gradients are wrong on Hopper GPUs.
FLA = ("fla.ops.simple_gla", "fla-core>=0.6", "triton>=3.7.1")
MAMBA_SSM = ("mamba_ssm.ops.triton.ssd_combined", "mamba-ssm>=2.2.2")

FLA_DELTA = "fla.ops.gated_delta_rule"

# Up to so many tokens are computed one by one, as in the layers of flash-linear-attention, and so
# are calls with more rows times heads than blocks fit into the second axis of a grid.
FLA_FEW, FLA_MOST = 64, 2**16 - 1
# The least log decay, also at document starts, where −∞ − −∞ would be NaN. It keeps 1e-13 of the
# state before it, far less than float32 rounds away. Running sums near it are rounded to 2e-6: the
# relative error of the decays after it in its chunk. With −1e4 the error would be 1e-3.
NEVER = -30.0

# Tokens per chunk, the default of mamba-ssm, and the first offset that does not fit into the 32
# bits of its kernels, which would read other numbers without an error (state-spaces/mamba#1015).
CHUNK, OFFSETS = 256, 2**31


@reversible
def fla_scan(
    inputs: ScanInputs, state: Tensor | None = None, *, final: bool = True
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.definition.scan`; in float32."""
    if not torch.is_grad_enabled():
        return _fla(inputs, state, final)
    y, after = checkpoint(_fla, inputs, state, final, use_reentrant=False, preserve_rng_state=False)
    return _once_differentiable(y, after)


def _fla(inputs: ScanInputs, state: Tensor | None, final: bool) -> tuple[Tensor, Tensor]:
    simple_gla = import_module(FLA[0])
    x, gain, log_decay, B, C = inputs.to(torch.float32)
    rows, time, heads = x.shape[:3]
    few = time <= FLA_FEW or rows * heads > FLA_MOST
    kernel = simple_gla.fused_recurrent_simple_gla if few else simple_gla.chunk_simple_gla
    y, after = kernel(
        q=C.repeat_interleave(heads // C.shape[2], 2),
        k=B.repeat_interleave(heads // B.shape[2], 2),
        v=x * gain[..., None],
        g=log_decay.clamp(min=NEVER),
        scale=1.0,
        initial_state=None if state is None else state.mT,
        output_final_state=final,
    )
    return y, y if after is None else after.mT


def fla_delta(
    inputs: ScanInputs, state: Tensor | None = None, *, final: bool = True
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.delta.definition.delta`; in float32."""
    rules = import_module(FLA_DELTA)
    x, beta, log_decay, B, C = inputs.to(torch.float32)
    rows, time, heads = x.shape[:3]
    few = time <= FLA_FEW or rows * heads > FLA_MOST
    # The kernel for few tokens has no gradients.
    tracked = torch.is_grad_enabled() and any(
        one is not None and one.requires_grad for one in (*inputs, state)
    )
    kernel = (
        rules.fused_recurrent_gated_delta_rule
        if few and not tracked
        else rules.chunk_gated_delta_rule
    )
    y, after = kernel(
        q=C,
        k=B,
        v=x,
        g=log_decay.clamp(min=NEVER),
        beta=beta,
        scale=1.0,
        initial_state=None if state is None else state.mT.contiguous(),
        output_final_state=final,
    )
    return _once_differentiable(y, y if after is None else after.mT)


def mamba_ssm_recurrence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `mamba2_layer.definition.Recurrence`; `scan` computes few tokens and too many."""
    (rows, time, h, p), (g, n) = x.shape, B.shape[2:]
    # Per token: x, B per head, the states of chunks, C Bᵀ within chunks, and gradients of decays.
    largest = max(h * p, h * n, h * p * n // CHUNK, g * CHUNK, 8 * h)
    if time <= FEW or rows * (time + CHUNK) * largest >= OFFSETS:
        return scan(ScanInputs(x, dt, dt * A, B, C), state)
    x, dt, B, C = (one.float().contiguous() for one in (x, dt, B, C))
    y, after = import_module(MAMBA_SSM[0]).mamba_chunk_scan_combined(
        x, dt, A, B, C, CHUNK, initial_states=state, return_final_states=True
    )
    return _once_differentiable(y, after)


def _once_differentiable(y: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    for one in (y, state):
        if one.requires_grad:
            one.register_hook(_refuse_second_derivatives)
    return y, state


def _refuse_second_derivatives(_: Tensor) -> None:
    if torch.is_grad_enabled():  # create_graph=True, and torch cannot record what kernels compute
        raise UserError(
            "the GPU kernels have no second derivatives: load the model with backend='torch'"
        )


def fla_refusal(tensors: Sequence[Tensor | None]) -> str | None:
    """Why flash-linear-attention cannot compute this call; None if it can."""
    return _refusal(tensors) or missing(*FLA)


def mamba_ssm_refusal(tensors: Sequence[Tensor | None]) -> str | None:
    """Why mamba-ssm cannot compute this call; None if it can."""
    return _refusal(tensors) or missing(*MAMBA_SSM)


def _refusal(tensors: Sequence[Tensor | None]) -> str | None:
    given = [one for one in tensors if one is not None]
    if torch.version.hip is not None or any(one.device.type != "cuda" for one in given):
        return "its tensors are not on an NVIDIA GPU"
    if any(one.dtype == torch.float64 for one in given):
        return "it computes in float32, and its tensors are float64"
    if is_transformed():
        return "torch transforms or records its operations"
    return None


@cache
def missing(module: str, *packages: str) -> str | None:
    """Why a module cannot be used, and what to do; None if it can.

    Args:
        module: its name; it is imported.
        packages: what must be installed, with the oldest versions.
    """
    os.environ.setdefault("TRITON_F32_DEFAULT", "tf32x3")
    try:
        for one in map(Requirement, packages):
            if (found := version(one.name)) not in one.specifier:
                raise ImportError(f"{one.name} {found} is installed")
        import_module(module)
    except Exception as error:  # compiled parts raise OSError or RuntimeError on another machine
        quoted = " ".join(f"'{one}'" for one in packages)
        return f"{module} cannot be imported ({one_line(error)}): pip install {quoted}"
    return None
