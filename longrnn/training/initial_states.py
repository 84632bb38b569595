"""The states from which training rows start (arXiv 2507.02782; 2410.07145 for carried ones).

Notable choices:
- What is random is a function of (seed, step, micro-batch, row of the global batch), what is
  remembered is in `content`, which goes into checkpoints: a resume is bit for bit.
- A state is handed on whole: hidden and cell vectors, the state of the recurrence and that of the
  convolution. It is always detached: no gradient reaches an earlier step.
- Rows are chosen by `torch.where` (`state.reset`): neither a NaN nor an infinity survives a zero
  start, and a row that was left with one starts from zero.
- Positions start at 0 with every row, except where a state is carried: there, the row goes on.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.registry import Registry
from longrnn.state import LMState, PyTree, detach, leaves, reset, take, tree_map
from longrnn.tasks import Batch
from longrnn.training.seeds import mix


class Context(NamedTuple):
    """What a policy knows of its run.

    Attributes:
        init_state: the zero states of so many rows, on the run's device.
        seed: of the run.
        rank: of this process.
        world_size: number of processes, which have equally many rows.
        total: sums a tensor over processes.
    """

    init_state: Callable[[int], LMState]
    seed: int
    rank: int
    world_size: int
    total: Callable[[Tensor], Tensor]


class InitialState(ABC):
    """Where rows start.

    Args of every member's constructor: `context`; options are keyword-only.

    Attributes:
        streams: whether rows are streams: consecutive segments of documents.
    """

    streams = False

    def __init__(self, context: Context, *, zero_share: float = 0.1) -> None:
        if not 0 <= zero_share <= 1:
            raise UserError(f"zero_share must be between 0 and 1, not {zero_share}")
        self.context, self.zero_share = context, zero_share

    def before(self, batch: Batch, step: int, micro: int) -> LMState:
        """The states from which the rows of a micro-batch start."""
        rows = len(batch.tokens)
        zero = self.context.init_state(rows)
        # A row's seed is that of its place in the global batch, on however many processes.
        first = self.context.rank * rows
        seeds = [mix(self.context.seed, step, micro, first + row) for row in range(rows)]
        state = self._draw(zero, batch.is_document_start, seeds, micro)
        zeros = [random.Random(seed).random() < self.zero_share for seed in seeds]
        return reset(state, zero, torch.tensor(zeros).to(zero.position.device) | ~_finite(state))

    def after(self, state: LMState, micro: int) -> None:  # noqa: B027 (most remember nothing)
        """Takes note of the states after the last tokens of a micro-batch."""

    def content(self) -> dict[str, Tensor]:
        """What is remembered, on the CPU: `restore` takes it back."""
        return {}

    def restore(self, content: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Takes up what `content` gave."""

    @abstractmethod
    def _draw(
        self, zero: LMState, is_document_start: Tensor, seeds: Sequence[int], micro: int
    ) -> LMState:
        """The states of rows that do not start from zero.

        Args:
            zero: the zero states of the rows.
            is_document_start: `(b,)` bool, see `Batch`.
            seeds: one a row.
            micro: which micro-batch.
        """


INITIAL_STATES: Registry[InitialState] = Registry("initial state")


def uses_streams(spec: Mapping[str, Any]) -> bool:
    """Whether the policy that `spec` describes reads documents in streams."""
    kind = spec.get("kind")
    return isinstance(kind, str) and INITIAL_STATES[kind].streams


@INITIAL_STATES.register("zero")
class Zero(InitialState):
    """Every row starts from zero."""

    def __init__(self, context: Context) -> None:
        super().__init__(context, zero_share=1.0)

    def _draw(
        self, zero: LMState, is_document_start: Tensor, seeds: Sequence[int], micro: int
    ) -> LMState:
        return zero


class Remembering(InitialState):
    """A policy that remembers the final states of its last batch, for each micro-batch its own."""

    def __init__(self, context: Context, *, zero_share: float) -> None:
        super().__init__(context, zero_share=zero_share)
        self.states: dict[int, LMState] = {}

    def after(self, state: LMState, micro: int) -> None:
        self.states[micro] = detach(state)

    def content(self) -> dict[str, Tensor]:
        return {
            f"{micro}/{name}": leaf.cpu()
            for micro, state in self.states.items()
            for name, leaf in leaves(state)
        }

    def restore(self, content: Mapping[str, Tensor]) -> None:
        for micro in sorted({int(name.split("/")[0]) for name in content}):
            like = self.context.init_state(len(content[f"{micro}/position"]))
            kept = [content[f"{micro}/{n}"].to(leaf.device) for n, leaf in leaves(like)]
            self.states[micro] = _filled(like, kept)


@INITIAL_STATES.register("carry")
class Carry(Remembering):
    """Truncated back-propagation through time: rows are streams, each goes on where it stopped.

    Args:
        context: of the run.
        zero_share: share of segments that forget what came before, in the middle of a document.
    """

    streams = True

    def __init__(self, context: Context, *, zero_share: float = 0.0) -> None:
        super().__init__(context, zero_share=zero_share)

    def _draw(
        self, zero: LMState, is_document_start: Tensor, seeds: Sequence[int], micro: int
    ) -> LMState:
        return reset(self.states.get(micro, zero), zero, is_document_start)


@INITIAL_STATES.register("pass")
class Pass(Remembering):
    """State passing: independent rows start from the final states of the previous batch, shuffled.

    The rows of one process are shuffled among themselves, so that no state moves to another
    process: a run on two processes is not the run on one with twice the batch.

    Args:
        context: of the run.
        zero_share: share of rows that start from zero.
    """

    def __init__(self, context: Context, *, zero_share: float = 0.1) -> None:
        super().__init__(context, zero_share=zero_share)

    def _draw(
        self, zero: LMState, is_document_start: Tensor, seeds: Sequence[int], micro: int
    ) -> LMState:
        if micro not in self.states:
            return zero
        rows, last = len(seeds), self.states[micro]
        order = torch.randperm(len(last.position), generator=_generator(seeds[0]))
        # A batch may have other numbers of rows than the one before (batch_tokens).
        chosen = order.repeat(-(-rows // len(order)))[:rows]
        return take(last, chosen)._replace(position=zero.position)


@INITIAL_STATES.register("fitted_noise")
class FittedNoise(InitialState):
    """Normal noise with the running mean and deviation of final states.

    Both are taken for each layer and head of a recurrence's state `(b, h, p, n)`, and for each
    layer and unit of any other vector. Until the first step has ended, rows start from zero.

    Args:
        context: of the run.
        zero_share: share of rows that start from zero.
        momentum: weight of the past when a batch is added to the running moments.
    """

    def __init__(
        self, context: Context, *, zero_share: float = 0.1, momentum: float = 0.99
    ) -> None:
        super().__init__(context, zero_share=zero_share)
        if not 0 <= momentum < 1:
            raise UserError(f"momentum must be at least 0 and below 1, not {momentum}")
        self.momentum = momentum
        # By leaf: running means of x and x², `(2, units)` float64, both too small by `weight`.
        self.moments: dict[str, Tensor] = {}
        self.weight = 0.0

    def after(self, state: LMState, micro: int) -> None:
        found = {name: _moments(leaf.detach()) for name, leaf in leaves(state.layers)}
        flat = torch.cat([pair.flatten() for pair in found.values()])
        flat = self.context.total(flat) / self.context.world_size
        if not bool(flat.isfinite().all()):
            return  # a step that failed teaches nothing
        parts = flat.split([pair.numel() for pair in found.values()])
        for (name, pair), part in zip(found.items(), parts, strict=True):
            before = self.moments.get(name, torch.zeros_like(pair))
            self.moments[name] = before.lerp(part.view_as(pair), 1 - self.momentum)
        self.weight += (1 - self.weight) * (1 - self.momentum)

    def content(self) -> dict[str, Tensor]:
        weight = torch.tensor(self.weight, dtype=torch.float64)
        return {"weight": weight} | {name: pair.cpu() for name, pair in self.moments.items()}

    def restore(self, content: Mapping[str, Tensor]) -> None:
        device = self.context.init_state(1).position.device
        self.moments = {n: pair.to(device) for n, pair in content.items() if n != "weight"}
        self.weight = float(content["weight"])

    def _draw(
        self, zero: LMState, is_document_start: Tensor, seeds: Sequence[int], micro: int
    ) -> LMState:
        if not self.moments:
            return zero
        drawn = []
        for name, noise in leaves(_noise(zero.layers, seeds)):
            mean, square = self.moments[name] / self.weight
            deviation = (square - mean.square()).clamp(min=0).sqrt()
            mean, deviation = (_spread(values, noise) for values in (mean, deviation))
            drawn.append(noise * deviation + mean)
        return zero._replace(layers=_filled(zero.layers, drawn))


@INITIAL_STATES.register("random_noise")
class RandomNoise(InitialState):
    """Normal noise of mean 0 and one deviation in every entry of every state.

    Args:
        context: of the run.
        zero_share: share of rows that start from zero.
        std: the deviation.
    """

    def __init__(self, context: Context, *, zero_share: float = 0.1, std: float = 0.1) -> None:
        super().__init__(context, zero_share=zero_share)
        if not 0 < std < float("inf"):
            raise UserError(f"std must be above 0 and finite, not {std}: give such a number")
        self.std = std

    def _draw(
        self, zero: LMState, is_document_start: Tensor, seeds: Sequence[int], micro: int
    ) -> LMState:
        layers = tree_map(lambda leaf: self.std * leaf, _noise(zero.layers, seeds))
        return zero._replace(layers=layers)


def _generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _noise(like: PyTree, seeds: Sequence[int]) -> PyTree:
    """Standard normal entries in the shape of `like`, each row from its own seed."""

    device = next(leaf for _, leaf in leaves(like)).device

    def row(seed: int) -> PyTree:
        how: dict[str, Any] = {"generator": _generator(seed, device), "device": device}
        return tree_map(lambda leaf: torch.randn(leaf.shape[1:], dtype=leaf.dtype, **how), like)

    rows = [row(seed) for seed in seeds]
    return tree_map(lambda *drawn: torch.stack(drawn), *rows)


def _moments(leaf: Tensor) -> Tensor:
    """Means of x and x² for each head of `(b, h, p, n)`, or unit of `(…, d)`: `(2, units)`."""
    kept = 1 if leaf.ndim == 4 else leaf.ndim - 1
    others = [axis for axis in range(leaf.ndim) if axis != kept]
    wide = leaf.double()
    return torch.stack([wide.mean(others), wide.square().mean(others)])


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """`(units,)` in a shape that `like` takes, the inverse of what `_moments` does to axes."""
    return values.view((-1, 1, 1) if like.ndim == 4 else (-1,)).to(like.dtype)


def _finite(state: LMState) -> Tensor:
    """`(b,)` bool: which rows have no NaN and no infinity."""
    rows = [x.isfinite().reshape(len(x), -1).all(1) for _, x in leaves(state)]
    return torch.stack(rows).all(0)


def _filled(like: PyTree, values: Iterable[Tensor]) -> PyTree:
    """The structure of `like` with the tensors of `values` in the order of `state.leaves`."""
    ordered = iter(values)
    return tree_map(lambda _: next(ordered), like)
