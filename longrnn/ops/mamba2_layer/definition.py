"""What a Mamba-2 layer computes between its two projections (arXiv 2405.21060, section 7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.rows import Rows
from longrnn.ops.scan.definition import ScanInputs

if TYPE_CHECKING:
    from longrnn.ops.backend import Backend


class Mamba2State(NamedTuple):
    """`conv`: `(b, d_conv − 1, h p + 2 g n)`, the last inputs of the convolution;
    `ssm`: `(b, h, p, n)`, the recurrent state, float32 or wider."""

    conv: Tensor
    ssm: Tensor


class Weights(NamedTuple):
    """The parameters between the projections.

    Attributes:
        conv_weight: `(c, k)`, c = h p + 2 g n.
        conv_bias: `(c,)` or None.
        dt_bias: `(h,)`.
        A_log: `(h,)`, A = −exp(A_log).
        D: `(h,)`.
        norm_weight: `(h p,)`.
        groups: g, of B, C and the norm.
        norm_eps: added to the mean square.
        dt_limit: the least and the largest dt.
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


# (x, dt, A, B, C, state before) -> (y, state after), in the shapes of `ScanInputs`; A is `(h,)`.
Recurrence = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def cell(
    ops: Backend,
    projected: Tensor,
    weights: Weights,
    state: Mamba2State,
    recurrence: Recurrence | None = None,
    rows: Rows | None = None,
) -> tuple[Tensor, Mamba2State]:
    """Computes the layer between its projections from the operations of a backend.

    Args:
        ops: its `conv`, `scan` and `gate` are used.
        projected: `(b, t, h p + c + h)`: z, x B C and dt.
        weights: see `Weights`.
        state: before the first token.
        recurrence: takes the place of the plain one.
        rows: where documents and padding begin.

    Returns:
        The input of the output projection, `(b, t, h p)`, and the state after the last token.
    """
    h, p, n = state.ssm.shape[1:]
    g, dtype = weights.groups, state.ssm.dtype
    z, xBC, dt = projected.split([h * p, state.conv.shape[2], h], dim=-1)
    xBC, conv = ops.conv(xBC, weights.conv_weight, weights.conv_bias, state.conv, rows)
    if rows is not None:
        xBC = rows.without_padding(xBC)
    x, B, C = xBC.split([h * p, g * n, g * n], dim=-1)
    x, B, C = x.unflatten(-1, (h, p)), B.unflatten(-1, (g, n)), C.unflatten(-1, (g, n))
    dt = F.softplus(dt.to(dtype) + weights.dt_bias.to(dtype)).clamp(*weights.dt_limit)
    A = -weights.A_log.to(dtype).exp()
    if recurrence is None:
        y, ssm = ops.scan(ScanInputs(x, dt, dt * A, B, C), state.ssm)
    else:
        y, ssm = recurrence(x, dt, A, B, C, state.ssm)
    y = ops.gate(y, z, x, weights.D, weights.norm_weight, weights.norm_eps, g)
    return y, Mamba2State(conv, ssm)
