"""What the states of a model look like while prompts stream through them.

Notable choices:
- Decays are seen through the hook that mitigations use, behind the mitigation where there is one,
  and their logarithms are summed in float64: at a million tokens a float32 sum has no digits left.
- Prompts are rows of one batch, read in pieces that end where statistics are taken; nothing is kept
  of what lies between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.mitigations import Mitigated
from longrnn.mixers import Edit, Mixer, ScanningMixer, StepwiseMixer, Update
from longrnn.models import RecurrentLM
from longrnn.ops.ssd import ScanInputs
from longrnn.progress import Progress
from longrnn.state import LMState, PyTree


class Reading(NamedTuple):
    """One layer at one position; each `(b, h)` float64 on the CPU, a row a prompt.

    The state of a head is its p · n entries in Mamba-2; RNN, GRU and LSTM count as one head, whose
    state is the vector that recurs (c of an LSTM, h otherwise).

    Attributes:
        mean: over the entries.
        variance: over the entries.
        norm: Frobenius.
        retention: what is left of the state before the first token, exp(Σ log decay); for an LSTM
            and a GRU the mean over units of the product of their gates. None where the state is no
            weighted sum over tokens: in an Elman cell, and under a mitigation that redefines the
            recurrence.
        first_share: norm of what the first tokens contributed and is left, over `norm`; above 1
            where later tokens cancel it. 1 up to the end of the first tokens; None as above.
        output_norm: `(b,)`, mean over the tokens since the last reading of ‖y‖, y the output of
            the layer's mixer.
    """

    mean: Tensor
    variance: Tensor
    norm: Tensor
    retention: Tensor | None
    first_share: Tensor | None
    output_norm: Tensor


class Watch(Edit):
    """Sums the log decays of one layer: `(b, h, 1)` of heads, `(b, 1, d)` of units.

    Attributes:
        total: since the start.
        recent: since it was last set to 0.
    """

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.recent: Tensor | float = 0.0

    def edit_inputs(self, inputs: ScanInputs) -> ScanInputs:
        self._add(inputs.log_decay.double().sum(1)[..., None])
        return inputs

    def edit_step(self, before: Tensor, after: Update) -> Update:
        if after.keep is not None:
            self._add(after.keep.double().log()[:, None])
        return after

    def _add(self, log_decay: Tensor) -> None:
        self.total, self.recent = self.total + log_decay, self.recent + log_decay


class OutputNorm:
    """A forward hook that averages the norm of a mixer's output over tokens."""

    def __init__(self) -> None:
        self.sum: Tensor | float = 0.0
        self.count = 0

    def __call__(self, module: torch.nn.Module, args: Any, output: tuple[Tensor, PyTree]) -> None:
        norms = output[0].double().norm(dim=-1)
        self.sum, self.count = self.sum + norms.sum(1), self.count + norms.shape[1]

    def take(self) -> Tensor:
        """The mean since the last call, `(b,)`."""
        mean = torch.as_tensor(self.sum / self.count).cpu()
        self.sum, self.count = 0.0, 0
        return mean


@torch.no_grad()
def read(
    model: RecurrentLM | Mitigated,
    tokens: Tensor,
    stops: Sequence[int],
    *,
    first: int,
    progress: Progress | None = None,
) -> Iterator[tuple[int, list[Reading]]]:
    """Reads prompts and yields (tokens read, a reading a layer) at every stop.

    Args:
        model: with or without a mitigation.
        tokens: `(b, t)`, the prompts.
        stops: where to take statistics, ascending, from 1 to t.
        first: how many tokens `Reading.first_share` is about.
        progress: counts the tokens.

    Raises:
        UserError: a model of another kind.
    """
    check(model)
    defined = _decays_are_defined(model)
    # Without gates there is nothing to see, and the fused kernel may run.
    watches = [Watch() for _ in model.mixers] if defined else None
    state, contributions = model.init_state(len(tokens)), None
    device = state.position.device
    wanted = set(stops)
    position = 0
    with _hooks(model.mixers) as outputs:
        for cut in sorted({*stops, first}):
            if cut > max(stops):
                break
            piece = tokens[:, position:cut].to(device)
            state = _consume(model, piece, state, watches)
            position = cut
            if progress is not None:
                progress.advance(piece.numel(), piece.numel())
            if cut == first:
                contributions = _memories(model.mixers, state)
                for watch in watches or ():
                    watch.recent = 0.0
            if cut in wanted:
                yield (
                    cut,
                    [
                        _reading(
                            memory.double(),
                            None if watches is None else watches[layer],
                            None if contributions is None else contributions[layer].double(),
                            outputs[layer].take(),
                        )
                        for layer, memory in enumerate(_memories(model.mixers, state))
                    ],
                )


def check(model: object) -> None:
    """Raises a UserError where the states of a model cannot be read."""
    if not isinstance(model, RecurrentLM | Mitigated):
        raise UserError(
            f"the states of a {type(model).__name__} cannot be read: give a RecurrentLM, with or "
            "without a mitigation"
        )


def state_size(model: RecurrentLM | Mitigated) -> int:
    """Numbers in the state proper of one row, over all layers."""
    check(model)
    return sum(memory.numel() for memory in _memories(model.mixers, model.init_state(1)))


def _reading(
    memory: Tensor, watch: Watch | None, contribution: Tensor | None, output_norm: Tensor
) -> Reading:
    """One layer; `memory` and what the first tokens contributed are `(b, h, entries)`."""
    norm = memory.norm(dim=-1)
    retention = first_share = None
    if watch is not None:
        retention = torch.as_tensor(watch.total).exp().mean(-1).cpu()
        left = memory
        if contribution is not None:
            left = contribution * torch.as_tensor(watch.recent, dtype=torch.float64).exp()
        first_share = (left.norm(dim=-1) / norm).cpu()
    variance = memory.var(dim=-1, correction=0)
    return Reading(
        memory.mean(-1).cpu(), variance.cpu(), norm.cpu(), retention, first_share, output_norm
    )


def _decays_are_defined(model: RecurrentLM | Mitigated) -> bool:
    if isinstance(model, Mitigated) and any(part.runs_the_scan() for part in model.parts):
        return False
    return all(not isinstance(mixer, StepwiseMixer) or mixer.gated for mixer in model.mixers)


def _consume(
    model: RecurrentLM | Mitigated, tokens: Tensor, state: LMState, watches: list[Watch] | None
) -> LMState:
    if isinstance(model, Mitigated):
        return model(tokens, state, keep=0, observe=watches).state
    return model(tokens, state, keep=0, edits=watches).state


def _memories(mixers: Sequence[Mixer], state: LMState) -> list[Tensor]:
    """The state proper of every layer, `(b, h, entries)`."""
    found = []
    for mixer, layer in zip(mixers, state.layers, strict=True):
        assert isinstance(mixer, ScanningMixer | StepwiseMixer)
        found.append(mixer.memory(layer).reshape(len(state.position), mixer.n_heads, -1))
    return found


@contextmanager
def _hooks(mixers: Sequence[Mixer]) -> Iterator[list[OutputNorm]]:
    outputs = [OutputNorm() for _ in mixers]
    handles = [
        mixer.register_forward_hook(output) for mixer, output in zip(mixers, outputs, strict=True)
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
