"""RG-LRU: the real-gated linear recurrent unit, a recurrence of single channels.

For every channel, which is a head with one value and one key:

    h_t = a_t h_{t−1} + √(1 − a_t²) · i_t x_t,   y_t = h_t
    a = exp(−8 softplus(Λ) · r),   r = σ(W_r x + b_r),   i = σ(W_i x + b_i)

x is the input after a projection and a short convolution, and W_r and W_i are block diagonal. At
the first token of a document the factor of the input is 1. The output is W_o (gelu(W_y u) · y) for
the layer's input u. In a mitigation the step dt is r, the rate A is −8 softplus(Λ), and the factor
√(1 − a²) follows the decay that they give.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.cells.edit import Edit, Steps
from longrnn.cells.scanning import inverse_softplus
from longrnn.cells.weights import WHOLE, Part
from longrnn.hf.hybrid.shared_cell import LayerCell
from longrnn.ops.conv.definition import causal_filter
from longrnn.ops.rows import Rows
from longrnn.ops.scan.inputs import Decay, ScanInputs

# The factor of the rate, c in the paper.
RATE = 8.0
# A smaller 1 − a² counts as linear, so that the square root has a finite gradient at a = 1.
SMALLEST_SQUARE = 1e-30


class RGLRUState(NamedTuple):
    """`conv`: `(b, k − 1, c)`, the last inputs of the convolution; `ssm`: `(b, c, 1, 1)`, h in
    float32 or wider; `has_read`: `(b,)` bool, false before the first token."""

    conv: Tensor
    ssm: Tensor
    has_read: Tensor


class RGLRURest(NamedTuple):
    """`gate`: `(b, t, c)`; `conv`: of the next state; `is_first`: `(b, t, 1)` bool."""

    gate: Tensor
    conv: Tensor
    is_first: Tensor


class RGLRU(LayerCell):
    """The recurrent block of Griffin and RecurrentGemma (arXiv 2402.19427, section 2.4).

    Args:
        layer: a `RecurrentGemmaRecurrentBlock`.
    """

    recurrent_weights = ("layer.rg_lru.recurrent_param",)
    wide_weights = ("recurrent_param",)
    rate_weight = "layer.rg_lru.recurrent_param"
    bias_weight = "layer.rg_lru.recurrent_gate_bias"
    n_groups = 1

    def __init__(self, layer: Any, _: Any = None) -> None:
        super().__init__(layer, layer.hidden_size)
        self.n_heads = layer.lru_width

    @property
    def step_weights(self) -> dict[str, Part]:
        """The weights of r and i, and the bias of i."""
        names = "recurrent_gate_weight", "input_gate_weight", "input_gate_bias"
        return dict.fromkeys((f"layer.rg_lru.{name}" for name in names), WHOLE)

    def log_rate(self, weight: Tensor) -> Tensor:
        return (RATE * F.softplus(weight)).log()

    def weight_of_log_rate(self, log_rate: Tensor) -> Tensor:
        return inverse_softplus(log_rate.exp() / RATE)

    def before(
        self, x: Tensor, state: RGLRUState, edit: Edit, rows: Rows | None
    ) -> tuple[Steps, RGLRURest]:
        """Computes the convolution and the gates."""
        layer, unit, dtype = self.layer, self.layer.rg_lru, state.ssm.dtype
        conv = layer.conv_1d
        mixed, conv_state = causal_filter(
            layer.linear_x(x).to(dtype), conv.weight[:, 0], conv.bias, state.conv
        )
        r = self._gate(
            mixed, unit.recurrent_gate_weight, edit.biased(unit.recurrent_gate_bias.flatten())
        )
        i = self._gate(mixed, unit.input_gate_weight, unit.input_gate_bias)
        rate = -RATE * F.softplus(unit.recurrent_param.to(dtype))
        is_first = torch.zeros_like(x[..., :1], dtype=torch.bool)
        is_first[:, 0, 0] = ~state.has_read
        gate = layer.act_fn(layer.linear_y(x))
        return Steps((mixed * i)[..., None], r, Decay(r, rate)), RGLRURest(
            gate, conv_state, is_first
        )

    def _gate(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """σ of a block-diagonal product, `(b, t, c)`."""
        blocks = x.unflatten(-1, (len(weight), -1))
        products = torch.einsum("btgi,gij->btgj", blocks, weight.to(x.dtype))
        return (products.flatten(2) + bias.to(x.dtype).flatten()).sigmoid()

    def inputs(self, steps: Steps, rest: RGLRURest) -> tuple[ScanInputs, RGLRURest]:
        """Returns the inputs of the recurrence after the edits of the steps."""
        square = -torch.expm1(2 * steps.decay._replace(keep=None).log())
        gain = square * square.clamp(min=SMALLEST_SQUARE).rsqrt()
        gain = gain.masked_fill(rest.is_first, 1.0)
        ones = torch.ones_like(gain[..., :1, None])
        gain = gain if steps.add is None else gain * steps.add
        return ScanInputs(steps.x, gain, steps.decay, ones, ones), rest

    def after(self, y: Tensor, rest: RGLRURest, memory: Tensor) -> tuple[Tensor, RGLRUState]:
        """Computes the output of the layer."""
        gated = (y[..., 0] * rest.gate.to(y.dtype)).to(rest.gate.dtype)
        has_read = torch.ones(len(y), dtype=torch.bool, device=y.device)
        return self.layer.linear_out(gated), RGLRUState(rest.conv, memory, has_read)

    def state_like(self) -> RGLRUState:
        weight = self.layer.conv_1d.weight
        like = torch.empty(0, dtype=self.wide_dtype(weight), device="meta")
        return RGLRUState(
            like.new_empty(weight.shape[2] - 1, self.n_heads),
            like.new_empty(self.n_heads, 1, 1),
            like.new_empty((), dtype=torch.bool),
        )
