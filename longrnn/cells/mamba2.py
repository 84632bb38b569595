"""Mamba-2: a scalar-decay state-space cell with a short convolution and a gated output."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.cells.base import MIXERS, EditedState
from longrnn.cells.edit import Edit, Steps
from longrnn.cells.init import initialise
from longrnn.cells.scanning import ScanningCell, check_sizes, divided
from longrnn.errors import UserError
from longrnn.ops.backend import check_name, choose
from longrnn.ops.hooks import own_weight
from longrnn.ops.linear import Linear
from longrnn.ops.mamba2_layer import definition as mamba2
from longrnn.ops.mamba2_layer.definition import Mamba2State, Weights
from longrnn.ops.rows import Rows
from longrnn.ops.scan.definition import ScanInputs
from longrnn.state import PyTree

UNLIMITED = (0.0, math.inf)


@lru_cache(maxsize=64)
def _state_like(conv: tuple[int, ...], ssm: tuple[int, ...], dtype: torch.dtype) -> Mamba2State:
    """Tensors without values, shared by all cells of these shapes: they are needed per token."""
    return Mamba2State(
        conv=torch.empty(conv, dtype=dtype, device="meta"),
        ssm=torch.empty(ssm, dtype=torch.promote_types(dtype, torch.float32), device="meta"),
    )


def _check_range(name: str, pair: list[float], *, limit: bool = False) -> None:
    """Refuses what is not a valid range [least, largest].

    Args:
        name: of the option.
        pair: the numbers given.
        limit: whether the range limits dt, so that its ends may be 0 and infinite. Other ranges are
            those of initial values, which must be positive and finite.
    """
    if len(pair) != 2:
        raise UserError(f"{name} is [least, largest], not {pair}: set two numbers in order")
    least, largest = pair
    positive = least >= 0 if limit else least > 0
    if not (positive and least <= largest and (limit or math.isfinite(largest))):
        raise UserError(
            f"{name} is [least, largest] with both {'at least' if limit else 'above'} 0, "
            f"not {pair}: give the smaller number first"
        )


@MIXERS.register("mamba2")
class Mamba2(ScanningCell):
    """The Mamba-2 cell (arXiv 2405.21060) with the weight names of the published models.

    Args:
        d_input: width of x.
        d_model: width of y.
        d_state: n, numbers of state per channel.
        head_dim: p, channels per head, a divisor of expand · d_model.
        expand: the inner width is expand · d_model.
        n_groups: g, a divisor of the number of heads; heads of a group share B and C.
        d_conv: k, width of the convolution.
        dt_min: smallest initial dt; initial dt is log-uniform in [dt_min, dt_max].
        dt_max: largest initial dt.
        dt_limit: [least, largest] dt at run time; null for no limit.
        A_init: [least, largest] initial −A, drawn uniformly.
        norm_eps: added to the mean square in the gated norm.
        bias: whether the two projections have a bias.
        conv_bias: whether the convolution has a bias.
        backend: `auto`, or a name in `longrnn.ops.backend.BACKENDS`.
        init: see `longrnn.cells.init`: `default` or `long_memory`.
    """

    recurrent_weights = ("in_proj.weight", "A_log", "dt_bias")
    wide_weights = ("A_log", "dt_bias", "D")
    projections = ("in_proj", "out_proj")
    # What takes the place of the gated norm in layers of another architecture; see `Backend.gate`.
    gate: Callable[..., Tensor] | None = None

    def __init__(
        self,
        d_input: int,
        d_model: int,
        *,
        d_state: int = 128,
        head_dim: int = 64,
        expand: int = 2,
        n_groups: int = 1,
        d_conv: int = 4,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        dt_limit: list[float] | None = None,
        A_init: list[float] = [1.0, 16.0],  # noqa: B006 (never changed)
        norm_eps: float = 1e-5,
        bias: bool = False,
        conv_bias: bool = True,
        backend: str = "auto",
        init: str = "default",
    ) -> None:
        super().__init__(d_input, d_model)
        check_sizes(
            norm_eps,
            d_state=d_state,
            head_dim=head_dim,
            expand=expand,
            n_groups=n_groups,
            d_conv=d_conv,
        )
        _check_range("A_init", A_init)
        if dt_limit is not None:
            _check_range("dt_limit", dt_limit, limit=True)
        _check_range("[dt_min, dt_max]", [dt_min, dt_max])
        d_inner = expand * d_model
        self.n_heads = divided(d_inner, "expand · d_model =", head_dim=head_dim)
        divided(self.n_heads, "the number of heads", n_groups=n_groups)
        self.d_inner, self.d_state, self.head_dim = d_inner, d_state, head_dim
        self.n_groups, self.d_conv, self.norm_eps = n_groups, d_conv, norm_eps
        self.dt_limit = UNLIMITED if dt_limit is None else (dt_limit[0], dt_limit[1])
        check_name(backend)
        self.backend = backend

        self.d_xBC = d_inner + 2 * n_groups * d_state
        self.in_proj = Linear(d_input, d_inner + self.d_xBC + self.n_heads, bias=bias)
        self.conv1d = nn.Conv1d(self.d_xBC, self.d_xBC, d_conv, groups=self.d_xBC, bias=conv_bias)
        log_dt = torch.empty(self.n_heads).uniform_(math.log(dt_min), math.log(dt_max))
        dt = log_dt.exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.A_log = nn.Parameter(torch.empty(self.n_heads).uniform_(*A_init).log())
        self.D = nn.Parameter(torch.ones(self.n_heads))
        self.norm = nn.RMSNorm(d_inner, eps=norm_eps)
        self.out_proj = Linear(d_inner, d_model, bias=bias)
        initialise(self, init)

    def run(
        self, x: Tensor, state: PyTree, edit: Edit | None, rows: Rows | None = None
    ) -> tuple[Tensor, PyTree]:
        own, recent = state if isinstance(state, EditedState) else (state, None)
        projected, weights = self.in_proj(x), self.weights()
        remembered = [] if recent is None else [one.entries for one in recent]
        ops = choose(self.backend, (projected, *weights[:6], *own, *remembered))
        if self.gate is not None:
            ops = ops._replace(gate=self.gate).composed()
        if edit is None and rows is None and not self.is_observed:
            y, own = ops.cell(projected, weights, own)
            return self.out_proj(y), own

        def recurrence(
            x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, memory: Tensor
        ) -> tuple[Tensor, Tensor]:
            nonlocal recent

            def inputs(steps: Steps, log_decay: Tensor, add: Tensor | None) -> ScanInputs:
                gain = steps.dt if add is None else steps.dt * add
                return ScanInputs(steps.x, gain, log_decay, B, C)

            given = Steps(x, dt, A), inputs, (memory, recent)
            y, memory, recent = self.scan(*given, edit, ops, rows)
            return y, memory

        y, own = mamba2.cell(ops, projected, weights, own, recurrence, rows)
        return self.out_proj(y), own if recent is None else EditedState(own, recent)

    def weights(self) -> Weights:
        """The parameters between the projections."""
        return Weights(
            own_weight(self.conv1d)[:, 0],
            self.conv1d.bias,
            self.dt_bias,
            self.A_log,
            self.D,
            own_weight(self.norm),
            self.n_groups,
            self.norm_eps,
            self.dt_limit,
        )

    @torch.no_grad()
    def init_time_scales(self, scales: Tensor) -> bool:
        self.A_log.copy_(-(scales * F.softplus(self.dt_bias)).log())  # dt · |A| = 1 / scale
        return True

    def state_like(self) -> Mamba2State:
        # Shards of a model may be gathered in a narrower dtype, but for those of the convolution.
        dtype = self.conv1d.weight.dtype
        ssm = (self.n_heads, self.head_dim, self.d_state)
        return _state_like((self.d_conv - 1, self.d_xBC), ssm, dtype)

    def inputs_like(self) -> ScanInputs:
        narrow = self.conv1d.weight.new_zeros(1, 0, 1)
        wide = narrow.to(self.state_like().ssm.dtype)
        by_head, by_group = (
            (self.n_heads, self.head_dim),
            (self.n_groups, self.d_state),
        )
        x, B = (narrow[..., None].expand(1, 0, *sizes) for sizes in (by_head, by_group))
        gain = wide.expand(1, 0, self.n_heads)
        return ScanInputs(x, gain, gain, B, B)

    def extra_repr(self) -> str:
        return f"n_heads={self.n_heads}, d_state={self.d_state}, backend={self.backend}"
