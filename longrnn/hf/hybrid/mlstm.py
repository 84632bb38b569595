"""mLSTM: the matrix memory of an xLSTM, with exponential input gates.

For every head, with the memory C `(p, n)` and the normaliser N `(n)`:

    C_t = f_t C_{t−1} + i_t v_t k_tᵀ,   N_t = f_t N_{t−1} + i_t k_t
    y_t = C_t q_t / max(|N_t · q_t|, 1),   f = σ(f̃),   i = exp(ĩ)

q is divided by √n, and the gates are ĩ, f̃ = c tanh(W x / c). The output is
W_o (σ(W_g x) · layer_norm(y)), normalised per head.

i overflows, so the memory is kept divided by exp(m), with m_0 = 0:

    m_t = max(log f_t + m_{t−1}, ĩ_t),   C' = exp(−m) C,   N' = exp(−m) N
    y_t = C'_t q_t / (max(|N'_t · q_t|, exp(−m_t)) + ε)

So the recurrence has the decay exp(log f_t + m_{t−1} − m_t) and the gain exp(ĩ_t − m_t), both at
most 1, and N' is one more row of C', whose value is 1. m is a maximum over sums of log f:
m_t = F_t + max(m_0, max_{j ≤ t} (ĩ_j − F_j)) with F_t = Σ_{j ≤ t} log f_j. An mLSTM has gates and
no step; a limit of norms is that of (C', N').
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.cells.edit import Edit, Steps
from longrnn.cells.weights import WHOLE, Part
from longrnn.hf.hybrid.shared_cell import LayerCell, UnsupportedLayerError
from longrnn.ops.rows import Rows
from longrnn.ops.scan.inputs import Decay, ScanInputs

# exp of a larger number would be infinite in float32, with a gradient that is NaN.
LARGEST_EXPONENT = 80.0


class MLSTMState(NamedTuple):
    """`ssm`: `(b, h, p + 1, n)`, C' and N' of every head, float32 or wider; `stabiliser`: `(b, h)`
    float64, m."""

    ssm: Tensor
    stabiliser: Tensor


class MLSTMRest(NamedTuple):
    """`q` and `k`: `(b, t, h, n)`; `log_input`: `(b, t, h)`, ĩ; `gate`: `(b, t, h p)`, before its
    sigmoid; `stabiliser`: `(b, h)`, m before the first token, then `(b, t, h)` of every token."""

    q: Tensor
    k: Tensor
    log_input: Tensor
    gate: Tensor
    stabiliser: Tensor


class MLSTM(LayerCell):
    """The mLSTM layer of an xLSTM (arXiv 2405.04517, section 2.3; arXiv 2503.13427).

    Args:
        layer: an `xLSTMLayer`.
    """

    has_steps = False
    bias_weight = "layer.fgate_preact.bias"
    shown = ("n_heads", "key_dim", "value_dim")

    def __init__(self, layer: Any, _: Any = None) -> None:
        super().__init__(layer, layer.config.hidden_size)
        if layer.config.weight_mode != "single":
            raise UnsupportedLayerError(f"its weight_mode is {layer.config.weight_mode}")
        self.n_heads = layer.config.num_heads
        self.key_dim, self.value_dim = layer.qk_dim // self.n_heads, layer.v_dim // self.n_heads

    @property
    def step_weights(self) -> dict[str, Part]:
        """The weights of i and f, and the bias of i."""
        names = "igate_preact.weight", "fgate_preact.weight", "igate_preact.bias"
        return dict.fromkeys((f"layer.{name}" for name in names), WHOLE)

    def before(
        self, x: Tensor, state: MLSTMState, edit: Edit, rows: Rows | None
    ) -> tuple[Steps, MLSTMRest]:
        """Computes queries, keys, values and gates."""
        layer, dtype, cap = self.layer, state.ssm.dtype, self.layer.config.gate_soft_cap
        added = edit.biased(state.ssm.new_zeros(self.n_heads))
        gates = layer.igate_preact(x).to(dtype), layer.fgate_preact(x).to(dtype) + added
        log_input, forget = gates if cap is None else (cap * (g / cap).tanh() for g in gates)
        q, k, v = (
            part(x).unflatten(-1, (self.n_heads, -1)).to(dtype)
            for part in (layer.q, layer.k, layer.v)
        )
        v = F.pad(v, (0, 1), value=1.0)
        steps = Steps(v, torch.ones_like(forget), Decay(F.logsigmoid(forget)))
        gate = layer.ogate_preact(x)
        return steps, MLSTMRest(q * self.key_dim**-0.5, k, log_input, gate, state.stabiliser)

    def inputs(self, steps: Steps, rest: MLSTMRest) -> tuple[ScanInputs, MLSTMRest]:
        """Returns the inputs of the recurrence after the edits, and m of every token."""
        add, log_decay = steps.add, steps.decay.log()
        log_input = rest.log_input if add is None else rest.log_input + add.log()
        log_input, log_forget = log_input.double(), log_decay.double()
        total = log_forget.cumsum(1)
        highest = (log_input - total).cummax(1).values
        m = total + highest.maximum(rest.stabiliser[:, None])
        before = torch.cat([rest.stabiliser[:, None], m[:, :-1]], dim=1)
        gain = (log_input - m).exp().to(log_decay)
        log_decay = (log_forget + before - m).clamp(max=0).to(log_decay)
        inputs = ScanInputs(steps.x, gain, Decay(log_decay), rest.k, rest.q)
        return inputs, rest._replace(stabiliser=m)

    def after(self, y: Tensor, rest: MLSTMRest, memory: Tensor) -> tuple[Tensor, MLSTMState]:
        """Computes the output of the layer."""
        layer, norm = self.layer, self.layer.multihead_norm
        values, normaliser = y.split([self.value_dim, 1], dim=-1)
        m = rest.stabiliser
        least = (-m[..., None]).clamp(max=LARGEST_EXPONENT).exp().to(y)
        values = values / (normaliser.abs().maximum(least) + layer.config.eps)
        normed = F.layer_norm(values, values.shape[-1:], eps=norm.eps).flatten(2) * norm.weight
        normed = normed if norm.bias is None else normed + norm.bias
        gated = (normed * rest.gate.to(y.dtype).sigmoid()).to(rest.gate.dtype)
        return layer.out_proj(gated), MLSTMState(memory, m[:, -1].clone())

    def state_like(self) -> MLSTMState:
        dtype = self.wide_dtype(self.layer.out_proj.weight)
        memory = torch.empty(
            self.n_heads, self.value_dim + 1, self.key_dim, dtype=dtype, device="meta"
        )
        return MLSTMState(memory, memory.new_empty(self.n_heads, dtype=torch.float64))
