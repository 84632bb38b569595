"""The definition of every mitigation, one token at a time, independent of the implementation.

`DEFINITIONS` has one class per mitigation. A chain is defined stage by stage, per token:

    dt, A         ← the cell's step and rate; each member's `steps`, in the order of the list
    keep, add     = exp(dt · A), dt · x Bᵀ; each member's `multiplied`
    h             ← keep ∘ h + add; then each member's `redefined`

A stepwise cell starts with its gates as keep and add. This file does not use `longrnn.ops` or the
edits, and is not fast. Vectors count as one head, so that every memory has the shape (b, h, p, n).
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.cells import Cell
from longrnn.cells.mamba3 import Mamba3State
from longrnn.cells.recurrent import LSTMState
from longrnn.cells.torch_cell import HiddenState
from longrnn.models import RecurrentLM
from longrnn.ops.conv.definition import ConvState
from longrnn.state import LMState, PyTree

Spec = dict[str, Any]


class Defined:
    """One mitigation in one layer of one run; this class changes nothing."""

    def __init__(self, spec: Spec, layer: int, n_heads: int) -> None:
        self.spec, self.layer, self.n_heads = spec, layer, n_heads

    def added(self, option: str, weight: Tensor) -> Tensor:
        """A weight that sets time scales, after this mitigation."""
        return weight

    def steps(self, dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
        return dt, A

    def multiplied(self, keep: Tensor | None, add: Tensor) -> tuple[Tensor | None, Tensor]:
        return keep, add

    def redefined(self, h: Tensor, keep: Tensor | None, add: Tensor) -> Tensor:
        """The memory after a token, from that which `keep` and `add` give."""
        return h

    def value(self, option: str, alone: float) -> Tensor:
        """The option's number for each head, (h, 1, 1); `alone` where a head is left alone."""
        given = self.spec[option]
        if isinstance(given, list):
            given = given[self.layer]
        numbers = given if isinstance(given, list) else [given] * self.n_heads
        filled = torch.tensor([alone if n is None else n for n in numbers], dtype=torch.float64)
        return torch.where(self.chosen(), filled[:, None, None], alone)

    def chosen(self) -> Tensor:
        """Which heads the spec names, (h, 1, 1) bool."""
        layers, heads = self.spec.get("layers"), self.spec.get("heads")
        named = [
            (layers is None or self.layer in layers)
            and (heads is None or head in heads or [self.layer, head] in heads)
            for head in range(self.n_heads)
        ]
        return torch.tensor(named)[:, None, None]


class ScaleDelta(Defined):
    def steps(self, dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
        return self.value("scale", 1.0) * dt, A


class ScaleDecay(Defined):
    def steps(self, dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
        return dt, self.value("scale", 1.0) * A


class PowerDecay(Defined):
    def steps(self, dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
        return dt, -(A.abs() ** self.value("scale", 1.0))


class TokenFilter(Defined):
    def steps(self, dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(dt <= self.value("threshold", -1.0), torch.zeros_like(dt), dt), A


class TimeScales(Defined):
    def added(self, option: str, weight: Tensor) -> Tensor:
        if option not in self.spec:
            return weight
        by_head = weight.reshape(self.n_heads, -1) + self.value(option, 0.0)[:, :, 0]
        return by_head.view(weight.shape)


class ForgetMore(Defined):
    def multiplied(self, keep: Tensor | None, add: Tensor) -> tuple[Tensor | None, Tensor]:
        assert keep is not None
        return self.value("decay_scale", 1.0) * keep, self.value("input_scale", 1.0) * add


class StateNorm(Defined):
    """`rescaled`: per token, which heads and rows were scaled down."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rescaled: list[Tensor] = []

    def redefined(self, h: Tensor, keep: Tensor | None, add: Tensor) -> Tensor:
        # Finite, because `where` would turn the gradient of an infinity into NaN.
        p = self.value("threshold", 1e30).clamp(max=1e30)
        square = h.square().sum((2, 3), keepdim=True)
        norm = square.where(square > 0, 1e-60).sqrt()  # which has a gradient
        self.rescaled.append(norm > p)
        return torch.where(norm > p, h * (p / norm), h)


class SlidingWindow(Defined):
    """`terms`: the contributions inside the window, each decayed to the present token."""

    terms: Tensor | None = None

    def redefined(self, h: Tensor, keep: Tensor | None, add: Tensor) -> Tensor:
        assert keep is not None
        terms = add.new_zeros(0, *add.shape) if self.terms is None else self.terms
        self.terms = torch.cat([terms * keep.expand_as(h), add[None]])[-self.spec["window"] :]
        return torch.where(self.chosen(), self.terms.sum(0), h)


DEFINITIONS: dict[str, type[Defined]] = {
    "none": Defined,
    "forget_more": ForgetMore,
    "power_decay": PowerDecay,
    "scale_decay": ScaleDecay,
    "scale_delta": ScaleDelta,
    "sliding_window": SlidingWindow,
    "state_norm": StateNorm,
    "time_scales": TimeScales,
    "token_filter": TokenFilter,
}

# The names of the weights that determine the time scales of each cell.
RATES: dict[str, str] = dict.fromkeys(("mamba", "mamba2", "gated_deltanet", "kda"), "A_log")
BIASES: dict[str, str] = dict.fromkeys(("mamba2", "mamba3", "gated_deltanet", "kda"), "dt_bias")
BIASES |= {"mamba": "dt_proj.bias", "lstm": "cell.bias_hh_l0", "gru": "cell.bias_hh_l0"}


class Replaced:
    """An object with another value of one attribute, which may be one of an attribute of it."""

    def __init__(self, thing: Any, name: str, value: Any) -> None:
        first, _, rest = name.partition(".")
        self._thing = thing
        setattr(self, first, Replaced(getattr(thing, first), rest, value) if rest else value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thing, name)


class Definition:
    """A chain of mitigations in one layer of one run."""

    def __init__(self, specs: Sequence[Spec], layer: int, n_heads: int) -> None:
        self.members = [DEFINITIONS[spec["kind"]](spec, layer, n_heads) for spec in specs]

    def added(self, option: str, weight: Tensor) -> Tensor:
        """A weight that sets time scales, after all mitigations."""
        for member in self.members:
            weight = member.added(option, weight)
        return weight

    def steps(self, dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
        """The step (b, h, 1, 1) and the rate (h, 1, 1) of a scanning cell."""
        for member in self.members:
            dt, A = member.steps(dt, A)
        return dt, A

    def scanned(self, dt: Tensor, A: Tensor, xB: Tensor, h: Tensor) -> Tensor:
        """The memory of a scanning cell after one token; dt (b, h, 1, 1), A (h, 1, 1)."""
        dt, A = self.steps(dt, A)
        return self.stepped(torch.exp(dt * A), dt * xB, h)

    def stepped(self, keep: Tensor | None, add: Tensor, h: Tensor) -> Tensor:
        """The memory after one token with these `keep` and `add`."""
        keep, add = self.multiplied(keep, add)
        return self.redefined(add if keep is None else keep * h + add, keep, add)

    def multiplied(self, keep: Tensor | None, add: Tensor) -> tuple[Tensor | None, Tensor]:
        for member in self.members:
            keep, add = member.multiplied(keep, add)
        return keep, add

    def redefined(self, h: Tensor, keep: Tensor | None, add: Tensor) -> Tensor:
        for member in self.members:
            h = member.redefined(h, keep, add)
        return h

    def vector(self, keep: Tensor | None, add: Tensor, h: Tensor) -> Tensor:
        """`stepped` for a cell whose memory is a vector, (b, d)."""
        wide = [None if value is None else value[:, None, :, None] for value in (keep, add, h)]
        return self.stepped(wide[0], wide[1], wide[2])[:, 0, :, 0]  # type: ignore[arg-type]


def normed(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def softplus(x: Tensor) -> Tensor:
    return (1 + x.exp()).log()


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def by_head(x: Tensor, groups: int, heads: int) -> Tensor:
    """The vectors of groups, each for all heads of its group: `(b, h, n)`."""
    return x.view(len(x), groups, -1)[:, [head // (heads // groups) for head in range(heads)]]


def convolved(mixer: Any, x: Tensor, state: ConvState) -> tuple[Tensor, Tensor]:
    """The short convolution with silu, and the inputs that it remembers."""
    seen = torch.cat([state.conv, x[:, None]], dim=1)
    u = (seen * mixer.conv1d.weight[:, 0].T).sum(1)
    if mixer.conv1d.bias is not None:
        u = u + mixer.conv1d.bias
    return u * u.sigmoid(), seen[:, 1:]


def lstm(mixer: Any, chain: Definition, x: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
    cell, (h, c) = mixer.cell, state
    gates = x @ cell.weight_ih_l0.T + cell.bias_ih_l0 + h @ cell.weight_hh_l0.T + cell.bias_hh_l0
    i, f, g, o = gates.chunk(4, dim=-1)
    c = chain.vector(f.sigmoid(), i.sigmoid() * g.tanh(), c)
    h = o.sigmoid() * c.tanh()
    return h, LSTMState(h, c)


def gru(mixer: Any, chain: Definition, x: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:
    cell, h = mixer.cell, state.h
    x_r, x_z, x_n = (x @ cell.weight_ih_l0.T + cell.bias_ih_l0).chunk(3, dim=-1)
    h_r, h_z, h_n = (h @ cell.weight_hh_l0.T + cell.bias_hh_l0).chunk(3, dim=-1)
    z = (x_z + h_z).sigmoid()
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    h = chain.vector(z, (1 - z) * n, h)
    return h, HiddenState(h)


def rnn(mixer: Any, chain: Definition, x: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:
    cell, h = mixer.cell, state.h
    sums = x @ cell.weight_ih_l0.T + cell.bias_ih_l0 + h @ cell.weight_hh_l0.T + cell.bias_hh_l0
    activation = {"tanh": Tensor.tanh, "relu": Tensor.relu, "identity": Tensor.clone}
    h = chain.vector(None, activation[mixer.cpu_cell](sums), h)
    return h, HiddenState(h)


def mamba(mixer: Any, chain: Definition, x: Tensor, state: ConvState) -> tuple[Tensor, ConvState]:
    """Every channel is a head with a step of its own, and every key has a rate of its own."""
    x, z = F.linear(x, mixer.in_proj.weight, mixer.in_proj.bias).chunk(2, dim=-1)
    u, conv = convolved(mixer, x, state)
    selected = (u @ mixer.x_proj.weight.T).split([mixer.dt_rank, mixer.d_state, mixer.d_state], -1)
    if mixer.select_norm_eps is not None:
        selected = [normed(part, mixer.select_norm_eps) for part in selected]
    delta, B, C = selected
    dt = softplus(delta @ mixer.dt_proj.weight.T + mixer.dt_proj.bias)
    xB = u[:, :, None, None] * B[:, None, None, :]
    h = chain.scanned(dt[:, :, None, None], -mixer.A_log.exp()[:, None, :], xB, state.ssm)
    y = (h[:, :, 0] * C[:, None]).sum(-1) + mixer.D * u
    y = F.linear(y * z * z.sigmoid(), mixer.out_proj.weight, mixer.out_proj.bias)
    return y, ConvState(conv, h)


def mamba2(mixer: Any, chain: Definition, x: Tensor, state: ConvState) -> tuple[Tensor, ConvState]:
    heads, p, groups, n = mixer.n_heads, mixer.head_dim, mixer.n_groups, mixer.d_state
    z, xBC, dt = F.linear(x, mixer.in_proj.weight, mixer.in_proj.bias).split(
        [heads * p, heads * p + 2 * groups * n, heads], dim=-1
    )
    xBC, conv = convolved(mixer, xBC, state)
    u, B, C = xBC.split([heads * p, groups * n, groups * n], dim=-1)
    u = u.view(-1, heads, p)
    B, C = by_head(B, groups, heads), by_head(C, groups, heads)
    dt = softplus(dt + mixer.dt_bias)
    if mixer.dt_limit is not None:
        dt = dt.clamp(*mixer.dt_limit)
    xB = u[..., :, None] * B[..., None, :]
    h = chain.scanned(dt[..., None, None], -mixer.A_log.exp()[:, None, None], xB, state.ssm)
    y = (h * C[..., None, :]).sum(-1) + mixer.D[:, None] * u
    y = (y.flatten(1) * z * z.sigmoid()).view(len(x), groups, -1)
    y = normed(y, mixer.norm_eps).flatten(1)
    y = F.linear(y * mixer.norm.weight, mixer.out_proj.weight, mixer.out_proj.bias)
    return y, ConvState(conv, h)


def gated_deltanet(
    mixer: Any, chain: Definition, x: Tensor, state: ConvState
) -> tuple[Tensor, ConvState]:
    """The step is β; the decay has a step of its own, which changes by the same factor."""
    heads, groups, n, p = mixer.n_heads, mixer.n_key_heads, mixer.key_dim, mixer.value_dim
    sizes = [groups * n, groups * n, heads * p]
    qkv, z, b, a = (x @ mixer.in_proj.weight.T).split([sum(sizes), heads * p, heads, heads], -1)
    qkv, conv = convolved(mixer, qkv, state)
    q, k, v = qkv.split(sizes, dim=-1)
    q, k = unit(by_head(q, groups, heads)), unit(by_head(k, groups, heads))
    beta = (b.sigmoid() * mixer.largest_beta)[..., None, None]
    scaled, A = chain.steps(beta, -mixer.A_log.exp()[:, None, None])
    decay_dt = softplus(a + mixer.dt_bias)[..., None, None] * (scaled / beta)
    beta = scaled.clamp(max=2)
    erased = state.ssm - beta * (state.ssm @ k[..., None]) * k[..., None, :]
    h = chain.stepped(
        (decay_dt * A).exp(), beta * v.view(-1, heads, p, 1) * k[..., None, :], erased
    )
    y = (h @ q[..., None])[..., 0] / n**0.5
    y = normed(y, mixer.norm_eps) * mixer.norm.weight
    y = (y.flatten(1) * z * z.sigmoid()) @ mixer.out_proj.weight.T
    return y, ConvState(conv, h)


def kda(mixer: Any, chain: Definition, x: Tensor, state: ConvState) -> tuple[Tensor, ConvState]:
    """As in Gated DeltaNet, but every key of a head has a decay, which comes before the erasing."""
    heads, groups, n, p = mixer.n_heads, mixer.n_key_heads, mixer.key_dim, mixer.value_dim
    sizes = [groups * n, groups * n, heads * p]
    qkv, a, g, b = (x @ mixer.in_proj.weight.T).split(mixer.in_sizes, -1)
    qkv, conv = convolved(mixer, qkv, state)
    q, k, v = qkv.split(sizes, dim=-1)
    q, k = unit(by_head(q, groups, heads)), unit(by_head(k, groups, heads))
    beta = b.sigmoid()[..., None, None]
    scaled, A = chain.steps(beta, -mixer.A_log.exp()[:, None, None])
    decay_dt = softplus(a @ mixer.decay_proj.weight.T + mixer.dt_bias)
    decay_dt = decay_dt.view(-1, heads, 1, n) * (scaled / beta)
    beta = scaled.clamp(max=2)
    keep, factor = chain.multiplied((decay_dt * A).exp(), torch.ones_like(beta))
    assert keep is not None
    decayed = keep * state.ssm
    erased = decayed - beta * (decayed @ k[..., None]) * k[..., None, :]
    add = factor * beta * v.view(-1, heads, p, 1) * k[..., None, :]
    h = chain.redefined(erased + add, keep, add)
    y = (h @ q[..., None])[..., 0] / n**0.5
    y = normed(y, mixer.norm_eps) * mixer.norm.weight
    y = (y.flatten(1) * (g @ mixer.gate_proj.weight.T).sigmoid()) @ mixer.out_proj.weight.T
    return y, ConvState(conv, h)


def mamba3(
    mixer: Any, chain: Definition, x: Tensor, state: Mamba3State
) -> tuple[Tensor, Mamba3State]:
    """A token whose step is 0 adds nothing: at the end of its own step, and before the next."""
    heads, groups, n = mixer.n_heads, mixer.n_vectors, mixer.d_state
    z, u, B, C, dt, A, mix, theta = (x @ mixer.in_proj.weight.T).split(mixer.in_sizes, dim=-1)
    u, mix = u.view(-1, heads, mixer.head_dim), mix.sigmoid()[..., None, None]
    dt = softplus(dt + mixer.dt_bias)[..., None, None]
    A = -softplus(A).clamp(min=1e-4)[..., None, None]
    dt, A = chain.steps(dt, A)
    angle = state.angle + dt[..., 0] * torch.pi * theta[:, None].tanh()
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotated(one: Tensor, norm: Tensor, bias: Tensor) -> Tensor:
        one = normed(by_head(one, groups, heads), mixer.norm_eps) * norm + bias
        pairs, rest = one.split([2 * mixer.n_angles, n - 2 * mixer.n_angles], dim=-1)
        turned = torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous()) * turn
        return torch.cat([torch.view_as_real(turned).flatten(-2), rest], dim=-1)

    B = rotated(B, mixer.B_norm.weight, mixer.B_bias)
    C = rotated(C, mixer.C_norm.weight, mixer.C_bias)
    read = torch.where(dt[..., 0] == 0, 0.0, u)
    keep, factor = chain.multiplied((dt * A).exp(), torch.ones_like(dt))
    assert keep is not None
    before = (1 - mix) * dt * keep * state.x[..., None] * state.B[..., None, :]
    add = factor * (before + mix * dt * read[..., None] * B[..., None, :])
    h = chain.redefined(keep * state.ssm + add, keep, add)
    y = ((h @ C[..., None])[..., 0] + mixer.D[:, None] * u).flatten(1) * z * z.sigmoid()
    return y @ mixer.out_proj.weight.T, Mamba3State(h, read, B, angle.remainder(2 * torch.pi))


CELLS: dict[str, Any] = {
    "mamba": mamba,
    "mamba3": mamba3,
    "lstm": lstm,
    "gru": gru,
    "rnn": rnn,
    "mamba2": mamba2,
    "gated_deltanet": gated_deltanet,
    "kda": kda,
}


def with_time_scales(kind: str, mixer: Any, chain: Definition) -> Any:
    """A cell with the weights that it has under a chain."""
    for option, names in (("rate", RATES), ("bias", BIASES)):
        if kind in names:
            weight = attrgetter(names[kind])(mixer)
            is_gate = kind in ("lstm", "gru")  # of which the second is the forget gate
            parts = list(weight.split(mixer.d_model)) if is_gate else [weight]
            parts[is_gate] = chain.added(option, parts[is_gate])
            mixer = Replaced(mixer, names[kind], torch.cat(parts))
    return mixer


def run_mixer(
    kind: str, mixer: Cell, chain: Definition, x: Tensor, state: PyTree
) -> tuple[Tensor, PyTree]:
    """`mixer(x, state)` under a chain."""
    return run_tokens(CELLS[kind], with_time_scales(kind, mixer, chain), chain, x, state)


def run_tokens(
    definition: Any, layer: Any, chain: Definition, x: Tensor, state: PyTree
) -> tuple[Tensor, PyTree]:
    """The outputs and the last state of a definition of one token, under a chain."""
    outputs = []
    for token in x.unbind(1):
        y, state = definition(layer, chain, token, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


class Reference:
    """A model without positional encoding under mitigations, computed from their definitions.

    An object is used for one run.

    Args:
        model: gives the weights.
        specs: the mitigations, in order.
    """

    def __init__(self, model: RecurrentLM, specs: Sequence[Spec]) -> None:
        self.model = model
        self.chains = [
            Definition(specs, layer, mixer.n_heads) for layer, mixer in enumerate(model.cells)
        ]

    def __call__(self, tokens: Tensor, state: LMState) -> tuple[Tensor, LMState]:
        model, config = self.model, self.model.config

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return normed(x, config.norm_eps) * weight

        x, layers = F.embedding(tokens, model.embedding.weight), []
        for block, chain, layer in zip(model.blocks, self.chains, state.layers, strict=True):
            residual = config.block == "residual"
            read = norm(x, block.norm.weight) if residual else x  # type: ignore
            y, layer = run_mixer(config.mixer["kind"], block.mixer, chain, read, layer)  # type: ignore
            x = x + y if residual else y
            layers.append(layer)
        if model.norm is not None:
            x = norm(x, model.norm.weight)
        return x @ model.head.weight.T, LMState(state.position + tokens.shape[1], tuple(layers))
