"""What a Mamba-2 layer computes between its two projections (arXiv 2405.21060, section 7).

`before` and `after` are what comes before and after the recurrence. The cell calls them around a
recurrence that is edited or packed; `layer` around the plain recurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from longrnn.ops import gpu
from longrnn.ops.conv import CONV
from longrnn.ops.conv.definition import ConvState
from longrnn.ops.gated_norm import GATED_NORM
from longrnn.ops.rows import Rows
from longrnn.ops.scan import SCAN, fla
from longrnn.ops.scan.decays import Decay
from longrnn.ops.scan.definition import ScanInputs

# The fields of `Weights` that are tensors.
TENSORS = ("conv_weight", "conv_bias", "dt_bias", "A_log", "D", "norm_weight")


class Weights(NamedTuple):
    """The parameters between the projections.

    Attributes:
        conv_weight: `(c, k)`, c = h p + 2 g n.
        conv_bias: `(c,)` or None.
        dt_bias: `(h,)`.
        A_log: `(h,)`, A = −exp(A_log).
        D: `(h,)`.
        norm_weight: `(h p,)`.
        groups: g, of B and C.
        norm_eps: added to the mean square.
        dt_limit: the least and the largest dt.
        norm_groups: of the norm; None for `groups`.
        gate: takes the place of `gated_rms_norm`, with its arguments; None for that function.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor
    norm_weight: Tensor
    groups: int
    norm_eps: float
    dt_limit: tuple[float, float]
    norm_groups: int | None = None
    gate: Callable[..., Tensor] | None = None

    def tensors(self) -> dict[str, Tensor | None]:
        """Those of `TENSORS` by name."""
        return {name: getattr(self, name) for name in TENSORS}


class Parts(NamedTuple):
    """What `after` needs of `before`, and the inputs of the recurrence.

    Attributes:
        z: `(b, t, h p)`, the gate.
        x: `(b, t, h, p)`.
        dt: `(b, t, h)`, the step, in the dtype of the state.
        A: `(h,)`, the rate, below 0, in the dtype of the state.
        B: `(b, t, g, n)`.
        C: `(b, t, g, n)`.
        conv: the last inputs of the convolution.
        weights: of the layer.
    """

    z: Tensor
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    conv: Tensor
    weights: Weights


def before(
    projected: Tensor, weights: Weights, state: ConvState, backend: str, rows: Rows | None = None
) -> Parts:
    """The convolution, and the step and the rate.

    Args:
        projected: `(b, t, h p + c + h)`: z, x B C and dt.
        weights: see `Weights`.
        state: before the first token.
        backend: see `Operation.choose`.
        rows: where documents and padding begin.
    """
    h, p, n = state.ssm.shape[1:]
    g, dtype = weights.groups, state.ssm.dtype
    z, xBC, dt = projected.split([h * p, state.conv.shape[2], h], dim=-1)
    xBC, conv = CONV(backend, xBC, weights.conv_weight, weights.conv_bias, state.conv, rows)
    if rows is not None:
        xBC = rows.without_padding(xBC)
    x, B, C = xBC.split([h * p, g * n, g * n], dim=-1)
    dt = F.softplus(dt.to(dtype) + weights.dt_bias.to(dtype)).clamp(*weights.dt_limit)
    A = -weights.A_log.to(dtype).exp()
    x, B, C = x.unflatten(-1, (h, p)), B.unflatten(-1, (g, n)), C.unflatten(-1, (g, n))
    return Parts(z, x, dt, A, B, C, conv, weights)


def after(y: Tensor, parts: Parts, backend: str) -> Tensor:
    """The input of the output projection `(b, t, h p)`, from the output of the recurrence."""
    weights = parts.weights
    D, weight, eps = weights.D, weights.norm_weight, weights.norm_eps
    groups = weights.groups if weights.norm_groups is None else weights.norm_groups
    if weights.gate is not None:
        return weights.gate(y, parts.z, parts.x, D, weight, eps, groups)
    return GATED_NORM(backend, y, parts.z, parts.x, D, weight, eps, groups)


def layer(
    projected: Tensor, weights: Weights, state: ConvState, backend: str = "torch"
) -> tuple[Tensor, ConvState]:
    """Computes the layer between its projections.

    Args:
        projected: `(b, t, h p + c + h)`.
        weights: see `Weights`.
        state: before the first token.
        backend: of the operations that it consists of.

    Returns:
        The input of the output projection, `(b, t, h p)`, and the state after the last token.
    """
    parts = before(projected, weights, state, backend)
    inputs = ScanInputs(parts.x, parts.dt, Decay(parts.dt, parts.A), parts.B, parts.C)
    y, ssm = SCAN(backend, inputs, state.ssm)
    return after(y, parts, backend), ConvState(parts.conv, ssm)


def fla_refusal(projected: Tensor, weights: Weights, state: ConvState) -> str | None:
    """Why flash-linear-attention cannot compute the recurrence of this call; None if it can."""
    tensors = (projected, *weights.tensors().values(), *state)
    return gpu.refusal(tensors, fla.BY_HEAD, *gpu.FLA_PACKAGES)
