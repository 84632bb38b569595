"""RNN, GRU and LSTM."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longrnn.cells.base import MIXERS
from longrnn.cells.edit import Update
from longrnn.cells.init import initialise
from longrnn.cells.torch_cell import HiddenState, TorchCell
from longrnn.cells.weights import Part, rows_from
from longrnn.errors import UserError, nearest


class LSTMState(NamedTuple):
    """`h`: `(b, d)`, the hidden vector and output; `c`: `(b, d)`, the cell vector."""

    h: Tensor
    c: Tensor


def gates(units: int) -> dict[str, Part]:
    """The weights of the first two gates of a `torch.nn` module, with the bias of the first one."""
    names = "cell.weight_ih_l0", "cell.weight_hh_l0"
    return dict.fromkeys(names, rows_from(0, 2 * units)) | {"cell.bias_ih_l0": rows_from(0, units)}


@MIXERS.register("lstm")
class LSTM(TorchCell):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997) with forget gate.

    c ← f ∘ c + i ∘ g, h ← o ∘ tanh(c), with i, f, o = σ(W x + U h + b), g = tanh(W x + U h + b).

    Args:
        d_input: width of x.
        d_model: width of h and c.
        init: see `longrnn.cells.init`: `default`, `orthogonal`, `xavier` or `long_memory`.
    """

    cpu_cell = "lstm"
    cpu_first = False  # torch's kernel reads the weights once for all rows of a batch
    bias_weight = "cell.bias_hh_l0"

    def __init__(self, d_input: int, d_model: int, *, init: str = "default") -> None:
        super().__init__(d_input, d_model)
        self.cell = nn.LSTM(d_input, d_model, batch_first=True)
        initialise(self, init)

    @torch.no_grad()
    def init_time_scales(self, scales: Tensor) -> bool:
        forget = (scales - 1).log()  # its sigmoid is 1 − 1 / scale
        _, _, bias_ih, bias_hh = self.cell.all_weights[0]
        bias_ih[: 2 * self.d_model] = torch.cat([-forget, forget])
        bias_hh[: 2 * self.d_model] = 0
        return True

    @property
    def step_weights(self) -> dict[str, Part]:
        return gates(self.d_model)

    def bias_sizes(self, weight: Tensor) -> list[int]:
        return [self.d_model, self.d_model, 2 * self.d_model]

    def state_like(self) -> LSTMState:
        return LSTMState(self.vector_like(), self.vector_like())

    def fused(self, cell: nn.RNNBase, x: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
        y, (h, c) = cell(x, (state.h[None].contiguous(), state.c[None].contiguous()))
        return y, LSTMState(h[0].to(state.h.dtype), c[0].to(state.c.dtype))

    def vector(self, state: LSTMState) -> Tensor:
        return state.c

    def state_of(self, h: Tensor, memory: Tensor) -> LSTMState:
        return LSTMState(h, memory)

    def step(
        self, projected: Tensor, state: LSTMState
    ) -> tuple[Update, Callable[[Tensor], LSTMState]]:
        i, f, g, o = (projected + self.recurrent(state.h)).chunk(4, dim=-1)
        update = Update(add=torch.sigmoid(i) * torch.tanh(g), keep=torch.sigmoid(f))
        return update, lambda c: LSTMState(torch.sigmoid(o) * torch.tanh(c), c)


@MIXERS.register("gru")
class GRU(TorchCell):
    """Gated recurrent unit (arXiv 1406.1078), in the variant of `torch.nn.GRU`.

    r = σ(W_r x + U_r h), z = σ(W_z x + U_z h), ñ = tanh(W_n x + r ∘ (U_n h + b)),
    h ← (1 − z) ∘ ñ + z ∘ h.

    Args:
        d_input: width of x.
        d_model: width of h.
        init: see `longrnn.cells.init`: `default`, `orthogonal`, `xavier` or `long_memory`.
    """

    cpu_cell = "gru"
    bias_weight = "cell.bias_hh_l0"

    def __init__(self, d_input: int, d_model: int, *, init: str = "default") -> None:
        super().__init__(d_input, d_model)
        self.cell = nn.GRU(d_input, d_model, batch_first=True)
        initialise(self, init)

    @torch.no_grad()
    def init_time_scales(self, scales: Tensor) -> bool:
        _, _, bias_ih, bias_hh = self.cell.all_weights[0]
        keep = slice(self.d_model, 2 * self.d_model)
        bias_ih[keep] = (scales - 1).log()  # its sigmoid is 1 − 1 / scale
        bias_hh[keep] = 0
        return True

    @property
    def step_weights(self) -> dict[str, Part]:
        return gates(self.d_model)

    def bias_sizes(self, weight: Tensor) -> list[int]:
        return [self.d_model] * 3

    def step(
        self, projected: Tensor, state: HiddenState
    ) -> tuple[Update, Callable[[Tensor], HiddenState]]:
        x_r, x_z, x_n = projected.chunk(3, dim=-1)
        h_r, h_z, h_n = self.recurrent(state.h).chunk(3, dim=-1)
        z = torch.sigmoid(x_z + h_z)
        candidate = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
        return Update(add=(1 - z) * candidate, keep=z), HiddenState


def identity(x: Tensor) -> Tensor:
    """Returns x unchanged."""
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "identity": identity,
}


@MIXERS.register("rnn")
class RNN(TorchCell):
    """h_t = φ(W_ih x_t + b_ih + W_hh h_{t−1} + b_hh), φ = tanh or relu (Elman, 1990).

    Args:
        d_input: width of x.
        d_model: width of h.
        nonlinearity: `tanh`, `relu`, or `identity` (a linear network, whose gradients are known).
        init: see `longrnn.cells.init`: `default`, `orthogonal`, `identity` or `xavier`.
    """

    gated = False

    def __init__(
        self, d_input: int, d_model: int, *, nonlinearity: str = "tanh", init: str = "default"
    ) -> None:
        super().__init__(d_input, d_model)
        if nonlinearity not in ACTIVATIONS:
            remedy = nearest(nonlinearity, ACTIVATIONS)
            raise UserError(f"unknown nonlinearity {nonlinearity!r}: {remedy}")
        # torch.nn has no linear kernel; with `identity` the module only holds the weights.
        self.has_kernel = nonlinearity != "identity"
        kernel = nonlinearity if self.has_kernel else "tanh"
        self.cell = nn.RNN(d_input, d_model, nonlinearity=kernel, batch_first=True)
        self.activation = ACTIVATIONS[nonlinearity]
        self.cpu_cell = nonlinearity
        initialise(self, init)

    def step(
        self, projected: Tensor, state: HiddenState
    ) -> tuple[Update, Callable[[Tensor], HiddenState]]:
        h = self.activation(projected + self.recurrent(state.h))
        return Update(add=h, keep=None), HiddenState
