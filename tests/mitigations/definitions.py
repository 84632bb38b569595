"""Every mitigation as its definition reads: one token after another, written here on its own.

A cell's memory follows h ← keep ∘ h + add. A mitigation changes keep and add of a token, or says
how the next memory is made of them. Nothing is fast here, and nothing of `longrnn.ops` is used;
vectors count as one head, so that every memory has the shape (b, h, p, n).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.mixers import Edit, Mixer
from longrnn.mixers.gru import GRUState
from longrnn.mixers.lstm import LSTMState
from longrnn.mixers.rnn import RNNState
from longrnn.models import RecurrentLM
from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.state import LMState, PyTree

Spec = dict[str, Any]


class Token(NamedTuple):
    """What one token does: `keep`, None for an Elman cell, and `add`; the first three broadcast to
    (b, h, p, n). Mamba-2 makes keep of a step dt and a rate A, log keep = dt · A (+ log_factor)."""

    keep: Tensor | None
    add: Tensor
    dt: Tensor | None = None
    A: Tensor | None = None
    log_factor: Tensor | float = 0.0

    def decay(self) -> Tensor | None:
        if self.dt is None or self.A is None:
            return self.keep
        return torch.exp(self.dt * self.A + self.log_factor)


class Definition:
    """One or several mitigations in one layer of one run.

    Attributes:
        rescaled: per token, which heads and rows a state_norm scaled down.
    """

    def __init__(self, specs: Sequence[Spec], layer: int, n_layers: int, n_heads: int) -> None:
        self.specs, self.layer, self.n_layers, self.n_heads = specs, layer, n_layers, n_heads
        self.terms: Tensor | None = None
        self.rescaled: list[Tensor] = []

    def __call__(self, token: Token, h: Tensor) -> Tensor:
        for spec in self.specs:
            token = self.edited(token, spec)
        keep = token.decay()
        after = token.add if keep is None else keep * h + token.add
        for spec in self.specs:
            if spec["kind"] == "state_norm":
                after = self.normed(after, spec)
            if spec["kind"] == "sliding_window":
                assert keep is not None
                within = self.windowed(keep.expand_as(h), token.add, spec["window"])
                after = torch.where(self.chosen(spec), within, after)
        return after

    def edited(self, token: Token, spec: Spec) -> Token:
        if spec["kind"] == "forget_more":
            m_a = self.value(spec, "decay_scale", 1.0)
            add = self.value(spec, "input_scale", 1.0) * token.add
            if token.dt is not None:
                return token._replace(log_factor=token.log_factor + m_a.log(), add=add)
            return token._replace(keep=m_a * token.keep, add=add)
        if spec["kind"] == "scale_delta":
            s = self.value(spec, "scale", 1.0)
            return token._replace(dt=s * token.dt, add=s * token.add)
        if spec["kind"] == "scale_decay":
            return token._replace(A=self.value(spec, "scale", 1.0) * token.A)
        if spec["kind"] == "power_decay":
            return token._replace(A=-((-token.A) ** self.value(spec, "scale", 1.0)))
        if spec["kind"] == "token_filter":
            short = token.dt <= self.value(spec, "threshold", -1.0)
            return token._replace(
                dt=token.dt.masked_fill(short, 0), add=token.add.masked_fill(short, 0)
            )
        return token

    def normed(self, h: Tensor, spec: Spec) -> Tensor:
        """h · min(1, p / ‖h‖), the norm over one head."""
        # No infinity: `where` would make its gradient a NaN.
        p = self.value(spec, "threshold", 1e30).clamp(max=1e30)
        norm = h.square().sum((2, 3), keepdim=True).sqrt()
        self.rescaled.append(norm > p)
        return torch.where(norm > p, h * (p / norm), h)

    def windowed(self, keep: Tensor, add: Tensor, window: int) -> Tensor:
        """The last `window` contributions, each decayed to the present token."""
        if self.terms is None:
            self.terms = add.new_zeros(0, *add.shape)
        self.terms = torch.cat([self.terms * keep, add[None]])[-window:]
        return self.terms.sum(0)

    def value(self, spec: Spec, option: str, alone: float) -> Tensor:
        """The option's number for each head, (h, 1, 1); `alone` where a head is left alone."""
        given = spec[option]
        if isinstance(given, list):
            given = given[self.layer]
        numbers = given if isinstance(given, list) else [given] * self.n_heads
        filled = torch.tensor([alone if n is None else n for n in numbers], dtype=torch.float64)
        return torch.where(self.chosen(spec), filled[:, None, None], alone)

    def chosen(self, spec: Spec) -> Tensor:
        """Which heads the spec names, (h, 1, 1) bool."""
        layers, heads = spec.get("layers"), spec.get("heads")
        named = [
            (layers is None or self.layer in layers)
            and (heads is None or head in heads or [self.layer, head] in heads)
            for head in range(self.n_heads)
        ]
        return torch.tensor(named)[:, None, None]


class Loop(Edit):
    """Runs a scanning cell by its definition."""

    def __init__(self, definition: Definition, A: Tensor) -> None:
        self.definition, self.A = definition, A

    def scan(self, inputs: ScanInputs, state: Tensor, ssd: SSD) -> tuple[Tensor, Tensor]:
        heads, groups = inputs.x.shape[2], inputs.B.shape[2]
        group_of_head = [head // (heads // groups) for head in range(heads)]
        A, h, outputs = self.A[:, None, None], state, []
        for t in range(inputs.x.shape[1]):
            x, B, C = inputs.x[:, t], inputs.B[:, t, group_of_head], inputs.C[:, t, group_of_head]
            dt = inputs.log_decay[:, t, :, None, None] / A
            add = torch.einsum("bhp,bhn->bhpn", x, B)
            h = self.definition(Token(None, add, dt, A), h)
            outputs.append(torch.einsum("bhpn,bhn->bhp", h, C))
        return torch.stack(outputs, dim=1), h


def vector(definition: Definition, keep: Tensor | None, add: Tensor, h: Tensor) -> Tensor:
    """The next memory of a cell whose memory is a vector, (b, d)."""
    wide = [None if value is None else value[:, None, :, None] for value in (keep, add, h)]
    return definition(Token(wide[0], wide[1]), wide[2])[:, 0, :, 0]  # type: ignore[arg-type]


def lstm(mixer: Any, definition: Definition, x: Tensor, state: LSTMState) -> LSTMState:
    cell, (h, c) = mixer.cell, state
    gates = x @ cell.weight_ih_l0.T + cell.bias_ih_l0 + h @ cell.weight_hh_l0.T + cell.bias_hh_l0
    i, f, g, o = gates.chunk(4, dim=-1)
    c = vector(definition, f.sigmoid(), i.sigmoid() * g.tanh(), c)
    return LSTMState(h=o.sigmoid() * c.tanh(), c=c)


def gru(mixer: Any, definition: Definition, x: Tensor, state: GRUState) -> GRUState:
    cell, h = mixer.cell, state.h
    x_r, x_z, x_n = (x @ cell.weight_ih_l0.T + cell.bias_ih_l0).chunk(3, dim=-1)
    h_r, h_z, h_n = (h @ cell.weight_hh_l0.T + cell.bias_hh_l0).chunk(3, dim=-1)
    z = (x_z + h_z).sigmoid()
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return GRUState(vector(definition, z, (1 - z) * n, h))


def rnn(mixer: Any, definition: Definition, x: Tensor, state: RNNState) -> RNNState:
    cell, h = mixer.cell, state.h
    sums = x @ cell.weight_ih_l0.T + cell.bias_ih_l0 + h @ cell.weight_hh_l0.T + cell.bias_hh_l0
    after = sums.tanh() if cell.nonlinearity == "tanh" else sums.relu()
    return RNNState(vector(definition, None, after, h))


STEPS = {"lstm": lstm, "gru": gru, "rnn": rnn}


def run_mixer(
    kind: str, mixer: Mixer, definition: Definition, x: Tensor, state: PyTree
) -> tuple[Tensor, PyTree]:
    """`mixer(x, state)` under a definition."""
    if kind not in STEPS:
        return mixer(x, state, Loop(definition, -mixer.A_log.exp()))  # type: ignore[operator]
    outputs = []
    for token in x.unbind(1):
        state = STEPS[kind](mixer, definition, token, state)
        outputs.append(state.h)
    return torch.stack(outputs, dim=1), state


class Reference:
    """A model under mitigations, without positions, by their definitions, for one run.

    Args:
        model: whose weights are used.
        specs: the mitigations, in order.
    """

    def __init__(self, model: RecurrentLM, specs: Sequence[Spec]) -> None:
        self.model, count = model, len(model.mixers)
        self.definitions = [
            Definition(specs, layer, count, mixer.n_heads)
            for layer, mixer in enumerate(model.mixers)
        ]

    def __call__(self, tokens: Tensor, state: LMState) -> tuple[Tensor, LMState]:
        model, config = self.model, self.model.config

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight

        x, layers = F.embedding(tokens, model.embedding.weight), []
        for block, definition, layer in zip(
            model.blocks, self.definitions, state.layers, strict=True
        ):
            residual = config.block == "residual"
            read = norm(x, block.norm.weight) if residual else x  # type: ignore
            kind: Any = config.mixer["kind"]
            y, layer = run_mixer(kind, block.mixer, definition, read, layer)  # type: ignore
            x = x + y if residual else y
            layers.append(layer)
        if model.norm is not None:
            x = norm(x, model.norm.weight)
        return x @ model.head.weight.T, LMState(state.position + tokens.shape[1], tuple(layers))

    def detach(self) -> None:
        """Cuts what the definitions remember from the graph."""
        for definition in self.definitions:
            if definition.terms is not None:
                definition.terms = definition.terms.detach()
