"""Mamba-3: a scalar-decay state-space cell with the exponential-trapezoidal rule and rotations.

Every head has the state h `(p, n)`. With the step Δ, the rate A < 0 and the input u_t = x_t B_tᵀ:

    h_t = α_t h_{t−1} + (1 − λ_t) Δ_t α_t u_{t−1} + λ_t Δ_t u_t,   y_t = h_t C_t
    α = exp(Δ A),   Δ = softplus(· + dt_bias),   A = −softplus(·),   λ = σ(·)

B and C are normalised, a bias is added by head, and pairs of their entries are rotated by the angle
Σ_{i ≤ t} Δ_i π tanh(θ_i) since the start of the document, which makes the state complex. The output
is W_o ((y + D x) · silu(z)). There is no convolution, and one input per head and token (SISO).

Without the last input, g_t = h_t − λ_t Δ_t u_t follows the recurrence of `longrnn.ops.scan`:

    g_t = α_t (g_{t−1} + (λ_{t−1} Δ_{t−1} + (1 − λ_t) Δ_t) u_{t−1})
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.cells.base import MIXERS
from longrnn.cells.edit import Edit, Steps
from longrnn.cells.init import initialise
from longrnn.cells.recurrence import Memory, Recurrence
from longrnn.cells.scanning import (
    ScanningCell,
    check_sizes,
    divided,
    inverse_softplus,
    step_bias,
)
from longrnn.cells.weights import Part, rows_from
from longrnn.errors import UserError
from longrnn.ops.hooks import own_weight
from longrnn.ops.linear import Linear
from longrnn.ops.norm import rms_norm
from longrnn.ops.operation import Operation
from longrnn.ops.rows import MORE_THAN_ANY_DOCUMENT, Rows
from longrnn.ops.scan.inputs import Decay, ScanInputs

# The slowest rate, as published.
A_FLOOR = 1e-4


class Mamba3State(NamedTuple):
    """`ssm`: `(b, h, p, n)`, the recurrent state; `x`: `(b, h, p)` and `B`: `(b, h, n)`, the last
    input; `angle`: `(b, h, a)` float64, by which the last B is rotated, from 0 to 2π."""

    ssm: Tensor
    x: Tensor
    B: Tensor
    angle: Tensor


class TrapezoidInputs(NamedTuple):
    """Inputs of `Trapezoid`: those of `ScanInputs`, with gain = Δ and one more x and B in front.

    `mix` `(b, t, h)` is λ.
    """

    x: Tensor
    gain: Tensor
    decay: Decay
    B: Tensor
    C: Tensor
    mix: Tensor


class Mamba3Rest(NamedTuple):
    """`x`: `(b, t, h, p)`; `z`: `(b, t, h p)`; `B` and `C`: `(b, t, h, n)`, not rotated; `mix`:
    `(b, t, h)`; `theta`: `(b, t, 1, a)`, the angle per step; `state`: before the first token, and
    after the last one but for `ssm`."""

    x: Tensor
    z: Tensor
    B: Tensor
    C: Tensor
    mix: Tensor
    theta: Tensor
    state: Mamba3State
    rows: Rows | None


class Trapezoid(Recurrence):
    """The recurrence of the module's docstring."""

    def forward(
        self,
        inputs: TrapezoidInputs,
        memory: Memory,
        edit: Edit,
        operation: Operation,
        backend: str,
        rows: Rows | None = None,
    ) -> tuple[Tensor, Memory]:
        """See `Recurrence`. A limit or a window needs h itself: then each token is two inputs."""
        x, B, C, log_decay = inputs.x, inputs.B, inputs.C, inputs.decay.log()
        right = inputs.mix * inputs.gain
        left = (1 - inputs.mix) * inputs.gain * log_decay.exp()
        if edit.limit is None and edit.window is None:
            left = left + log_decay.exp() * F.pad(right[:, :-1], (0, 0, 1, 0))
            given = ScanInputs(x[:, :-1], left, Decay(log_decay), B[:, :-1], C)
            y, state = operation(backend, given, memory.state)
            u = x[:, 1:] * right[..., None]
            y = y + u * (B[:, 1:] * C).sum(-1, keepdim=True)
            state = state + u[:, -1, :, :, None] * B[:, -1, :, None]
            return y, memory._replace(state=state)
        given = ScanInputs(
            _pairs(x[:, :-1], x[:, 1:]),
            _pairs(left, right),
            Decay(_pairs(log_decay, torch.zeros_like(log_decay))),
            _pairs(B[:, :-1], B[:, 1:]),
            _pairs(C, C),
        )
        if edit.limit is not None:
            limit = torch.stack([torch.full_like(edit.limit, torch.inf), edit.limit])
            edit = edit._replace(limit=limit.repeat(C.shape[1], 1))
        if edit.window is not None:
            edit = edit._replace(window=2 * edit.window)
        rows = None if rows is None else rows.doubled()
        y, memory = super().forward(given, memory, edit, operation, backend, rows)
        return y[:, 1::2], memory


def _pairs(first: Tensor, second: Tensor) -> Tensor:
    """`(b, 2 t, …)` from two tensors `(b, t, …)`, whose tokens take turns."""
    return torch.stack([first, second], 2).flatten(1, 2)


@MIXERS.register("mamba3")
class Mamba3(ScanningCell):
    """The Mamba-3 cell (arXiv 2603.15569) with the weight names of mamba-ssm.

    Args:
        d_input: width of x.
        d_model: width of y.
        d_state: n, numbers of state per channel.
        head_dim: p, channels per head, a divisor of expand · d_model.
        expand: the inner width is expand · d_model.
        n_groups: g, a divisor of the number of heads; heads of a group share B and C but for bias
            and rotation.
        rope_fraction: share of the entries of B and C that are rotated, in (0, 1].
        norm_eps: added to the mean square in the norms of B and C.
        backend: `auto`, `torch`, `cpu` or `fla`; see `longrnn.ops.operation`.
        init: see `longrnn.cells.init`: `default` or `long_memory`.
    """

    recurrent_weights = ("in_proj.weight", "dt_bias", "B_bias", "C_bias")
    wide_weights = ("dt_bias", "B_bias", "C_bias", "D")
    bias_weight = "dt_bias"
    projections = ("in_proj", "out_proj")
    shown = ("n_heads", "d_state")
    repeats = False

    def __init__(
        self,
        d_input: int,
        d_model: int,
        *,
        d_state: int = 128,
        head_dim: int = 64,
        expand: int = 2,
        n_groups: int = 1,
        rope_fraction: float = 0.5,
        norm_eps: float = 1e-5,
        backend: str = "auto",
        init: str = "default",
    ) -> None:
        super().__init__(d_input, d_model, backend)
        check_sizes(norm_eps, d_state=d_state, head_dim=head_dim, expand=expand, n_groups=n_groups)
        inner = expand * d_model
        self.n_heads = divided(inner, "expand · d_model =", head_dim=head_dim)
        divided(self.n_heads, "the number of heads", n_groups=n_groups)
        self.head_dim, self.d_state = head_dim, d_state
        self.n_angles = int(d_state * rope_fraction) // 2
        if not 0 < rope_fraction <= 1 or self.n_angles < 1:
            raise UserError(
                f"rope_fraction {rope_fraction} of d_state {d_state} is not a pair of entries or "
                "more: set a fraction up to 1, and a larger d_state"
            )
        self.n_vectors, self.norm_eps = n_groups, norm_eps  # of B and C before their biases

        h, gn = self.n_heads, n_groups * d_state
        self.in_sizes = [inner, inner, gn, gn, h, h, h, self.n_angles]  # z, x, B, C, Δ, A, λ, θ
        self.in_proj = Linear(d_input, sum(self.in_sizes), bias=False)
        self.dt_bias = step_bias(h)
        self.B_norm, self.C_norm = (nn.RMSNorm(d_state, eps=norm_eps) for _ in "BC")
        self.B_bias, self.C_bias = (nn.Parameter(torch.ones(h, d_state)) for _ in "BC")
        self.D = nn.Parameter(torch.ones(h))
        self.out_proj = Linear(inner, d_model, bias=False)
        self.recurrence = Trapezoid()
        initialise(self, init)

    @property
    def step_weights(self) -> dict[str, Part]:
        first = sum(self.in_sizes[:4])  # of Δ, A and λ
        return {"in_proj.weight": rows_from(first, first + 3 * self.n_heads)}

    def before(
        self, x: Tensor, state: Mamba3State, edit: Edit, rows: Rows | None
    ) -> tuple[Steps, Mamba3Rest]:
        projected, dtype = self.in_proj(x), state.ssm.dtype
        z, x, B, C, dt, A, mix, theta = projected.split(self.in_sizes, dim=-1)
        if rows is not None:
            x, theta = rows.without_padding(x), rows.without_padding(theta)
        x = x.unflatten(-1, (self.n_heads, -1)).to(dtype)
        dt = F.softplus(dt.to(dtype) + edit.biased(self.dt_bias).to(dtype))
        A = -F.softplus(A.to(dtype)).clamp(min=A_FLOOR)
        B = self._by_head(B.to(dtype), self.B_norm, self.B_bias)
        C = self._by_head(C.to(dtype), self.C_norm, self.C_bias)
        theta, mix = math.pi * theta.to(dtype).tanh()[:, :, None], mix.to(dtype).sigmoid()
        return Steps(x, dt, Decay(dt, A)), Mamba3Rest(x, z, B, C, mix, theta, state, rows)

    def inputs(self, steps: Steps, rest: Mamba3Rest) -> tuple[TrapezoidInputs, Mamba3Rest]:
        state, rows = rest.state, rest.rows
        angle = _total(steps.dt[..., None] * rest.theta, state.angle, rows)
        near = angle.to(rest.B)
        turn = torch.complex(near.cos(), near.sin())
        x = torch.cat([state.x[:, None], steps.x], 1)
        B = torch.cat([state.B[:, None], _rotated(rest.B, turn)], 1)
        C = _rotated(rest.C, turn)
        inputs = TrapezoidInputs(x, steps.gain, Decay(steps.decay.log()), B, C, rest.mix)
        last_x = x[:, -1:] if rows is None else rows.last(x, 1)
        last_B = B[:, -1:] if rows is None else rows.last(B, 1)
        # Copies, because slices would keep all tokens in memory.
        last = state._replace(
            x=last_x[:, 0].clone(), B=last_B[:, 0].clone(), angle=angle[:, -1].clone()
        )
        return inputs, rest._replace(state=last)

    def after(self, y: Tensor, rest: Mamba3Rest, memory: Tensor) -> tuple[Tensor, Mamba3State]:
        y = torch.addcmul(y, rest.x, self.D.to(y.dtype)[:, None]).flatten(2)
        y = (y * F.silu(rest.z.to(y.dtype))).to(rest.z.dtype)
        return self.out_proj(y), rest.state._replace(ssm=memory)

    def _by_head(self, vectors: Tensor, norm: nn.Module, bias: Tensor) -> Tensor:
        """Norm and bias of B or C, `(b, t, h, n)`."""
        normed = rms_norm(
            vectors.unflatten(-1, (self.n_vectors, -1)), own_weight(norm), self.norm_eps
        )
        return normed.repeat_interleave(self.n_heads // self.n_vectors, 2) + bias.to(vectors)

    @torch.no_grad()
    def init_time_scales(self, scales: Tensor) -> bool:
        # A = −ln 2 for an input of zeros.
        self.dt_bias.copy_(inverse_softplus(1 / (scales * math.log(2))))
        return True

    def state_like(self) -> Mamba3State:
        dtype = torch.promote_types(self.in_proj.weight.dtype, torch.float32)
        h, p, n = self.n_heads, self.head_dim, self.d_state
        ssm = torch.empty(h, p, n, dtype=dtype, device="meta")
        angle = ssm.new_empty(h, self.n_angles, dtype=torch.float64)
        return Mamba3State(ssm, ssm.new_empty(h, p), ssm.new_empty(h, n), angle)


def _total(turned: Tensor, before: Tensor, rows: Rows | None) -> Tensor:
    """The angle of each token, from those by which each turned, `(b, t, h, a)`; from 0 to 2π."""
    total = turned.double().cumsum(1)
    if rows is None:
        return (before[:, None] + total).remainder(2 * math.pi)
    since = rows.since_start[..., None, None]
    time = torch.arange(total.shape[1], device=total.device)[:, None, None]
    index = (time - since).clamp(min=0).expand_as(total)
    earlier = F.pad(total, (0, 0, 0, 0, 1, 0)).gather(1, index)  # other documents of the row
    return torch.where(
        since < MORE_THAN_ANY_DOCUMENT, total - earlier, before[:, None] + total
    ).remainder(2 * math.pi)


def _rotated(vectors: Tensor, turn: Tensor) -> Tensor:
    """`(b, t, h, n)` with the first pairs of entries times `turn`, complex `(b, t, h, a)`."""
    pairs, rest = vectors.tensor_split([2 * turn.shape[-1]], dim=-1)
    turned = torch.view_as_complex(pairs.contiguous().unflatten(-1, (-1, 2))) * turn
    rotated = torch.view_as_real(turned).flatten(-2)
    if rest.shape[-1] == 0:
        return rotated
    # The product has a gradient of its own, where that of `cat` may begin at an odd place in
    # memory, which torch cannot view as complex numbers.
    return torch.cat([rotated * 1, rest], -1)
