"""Measures statistics of the states of a model while it processes prompts.

Notable choices:
- Decays are observed by an edit, as mitigations are, after the edit of the mitigation if there is
  one. Their logarithms are summed in float64, because a float32 sum over a million tokens has lost
  its digits.
- Prompts are rows of one batch, processed in pieces that end at the positions of measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.mitigations import Mitigated
from longrnn.mixers import Composed, Edit, Mixer, ScanningMixer, StepwiseMixer, Update
from longrnn.models import RecurrentLM
from longrnn.ops.ssd import ScanInputs
from longrnn.progress import Progress
from longrnn.state import LMState, PyTree


class HeadStatistics(NamedTuple):
    """Statistics of one layer at one position, each `(b, h)` float64 on the CPU; rows are prompts.

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


class Decays(NamedTuple):
    """The carry of `DecayRecorder`: sums of log decays, `(b, h, 1)` by head or `(b, 1, d)` by unit.

    Attributes:
        total: since the start.
        recent: since it was last set to 0.
    """

    total: Tensor
    recent: Tensor

    def add(self, log_decay: Tensor) -> Decays:
        """Return the sums with further tokens."""
        return Decays(self.total + log_decay, self.recent + log_decay)


class DecayRecorder(Edit):
    """Sums the log decays of one layer without changing it."""

    def init_carry(self, mixer: Mixer, batch_size: int) -> Decays:
        device = next(mixer.parameters()).device
        zero = torch.zeros(batch_size, 1, 1, dtype=torch.float64, device=device)
        return Decays(zero, zero)

    def edit_inputs(self, inputs: ScanInputs, carry: Decays) -> tuple[ScanInputs, Decays]:
        return inputs, carry.add(inputs.log_decay.double().sum(1)[..., None])

    def edit_update(self, update: Update, carry: Decays) -> tuple[Update, Decays]:
        if update.keep is None:
            return update, carry
        return update, carry.add(update.keep.double().log()[:, None])


class OutputNorm:
    """A forward hook that averages the norm of a mixer's output over tokens."""

    def __init__(self) -> None:
        self.sum: Tensor | float = 0.0
        self.count = 0

    def __call__(self, module: torch.nn.Module, args: Any, output: tuple[Tensor, PyTree]) -> None:
        norms = output[0].double().norm(dim=-1)
        self.sum, self.count = self.sum + norms.sum(1), self.count + norms.shape[1]

    def take(self) -> Tensor:
        """Return the mean since the last call, `(b,)`, and reset it."""
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
) -> Iterator[tuple[int, list[HeadStatistics]]]:
    """Process prompts and yield the number of tokens read and the statistics of each layer.

    Args:
        model: with or without a mitigation.
        tokens: `(b, t)`, the prompts.
        stops: positions of measurements, ascending, from 1 to t.
        first: number of first tokens for `HeadStatistics.first_share`.
        progress: counts the tokens.

    Raises:
        UserError: a model of another kind.
    """
    check(model)
    plain, edits, watching = _watched(model)
    state, contributions = plain.init_state(len(tokens), edits), None
    device = state.position.device
    wanted = set(stops)
    position = 0
    with _hooks(model.mixers) as outputs:
        for cut in sorted({*stops, first}):
            if cut > max(stops):
                break
            piece = tokens[:, position:cut].to(device)
            state = plain(piece, state, keep=0, edits=edits).state
            position = cut
            if progress is not None:
                progress.advance(piece.numel(), piece.numel())
            if cut == first:
                contributions = _memories(model.mixers, state)
                state = _forget_recent(state) if watching else state
            if cut in wanted:
                yield (
                    cut,
                    [
                        _reading(
                            memory.double(),
                            state.extra[layer][-1] if watching else None,
                            None if contributions is None else contributions[layer].double(),
                            outputs[layer].take(),
                        )
                        for layer, memory in enumerate(_memories(model.mixers, state))
                    ],
                )


def check(model: object) -> None:
    """Raise a UserError if the states of a model are not accessible."""
    if not isinstance(model, RecurrentLM | Mitigated):
        raise UserError(
            f"the states of a {type(model).__name__} cannot be read: give a RecurrentLM, with or "
            "without a mitigation"
        )


def state_size(model: RecurrentLM | Mitigated) -> int:
    """Return the number of entries in the recurrent states of one row, over all layers."""
    check(model)
    return sum(memory.numel() for memory in _memories(model.mixers, model.init_state(1)))


def _reading(
    memory: Tensor, decays: Decays | None, contribution: Tensor | None, output_norm: Tensor
) -> HeadStatistics:
    """Return the statistics of one layer; `memory` and `contribution` are `(b, h, entries)`."""
    norm = memory.norm(dim=-1)
    retention = first_share = None
    if decays is not None:
        retention = decays.total.exp().mean(-1).cpu()
        left = memory if contribution is None else contribution * decays.recent.exp()
        first_share = (left.norm(dim=-1) / norm).cpu()
    variance = memory.var(dim=-1, correction=0)
    return HeadStatistics(
        memory.mean(-1).cpu(), variance.cpu(), norm.cpu(), retention, first_share, output_norm
    )


def _watched(
    model: RecurrentLM | Mitigated,
) -> tuple[RecurrentLM, Sequence[Composed] | None, bool]:
    """Return the plain model, its edits, and whether each layer has a `DecayRecorder`.

    If decays are not defined there is none, so that a plain cell can use its fused kernel.
    """
    plain, own = (model.model, model.edits) if isinstance(model, Mitigated) else (model, None)
    if not _decays_are_defined(model.mixers, own):
        return plain, own, False
    first: Sequence[Edit] = own or [Edit()] * len(model.mixers)
    return plain, [Composed([edit, DecayRecorder()]) for edit in first], True


def _decays_are_defined(mixers: Sequence[Mixer], edits: Sequence[Edit] | None) -> bool:
    if any(edit.redefines_recurrence for edit in edits or ()):
        return False
    return all(not isinstance(mixer, StepwiseMixer) or mixer.gated for mixer in mixers)


def _forget_recent(state: LMState) -> LMState:
    """Return a state in which every `Decays.recent` is 0."""
    extra = tuple(
        (own, decays._replace(recent=torch.zeros_like(decays.recent)))
        for own, decays in state.extra
    )
    return state._replace(extra=extra)


def _memories(mixers: Sequence[Mixer], state: LMState) -> list[Tensor]:
    """Return the recurrent state of every layer, `(b, h, entries)`."""
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
