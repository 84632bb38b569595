"""Measures statistics of the states of a model while it processes prompts.

Notable choices:
- Nothing is kept per token: sums over tokens (`observers`) and the states at the positions of
  measurements are enough.
- Prompts are rows of one batch, processed in pieces that end at the positions of measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.diagnostics.observers import DecayRecorder, Decays, MeanLoss, OutputMeans
from longrnn.errors import UserError
from longrnn.inference.prefill import scored_tokens
from longrnn.mitigations import Mitigated
from longrnn.mixers import Composed, Edit, Mixer, ScanningMixer, StepwiseMixer
from longrnn.models import EditableModel
from longrnn.progress import Progress
from longrnn.state import LMState


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


class ChannelStatistics(NamedTuple):
    """Statistics of one layer by channel at one position, each `(b, h, p)` float64 on the CPU.

    A channel of a head is one of the p rows of its p × n state in Mamba-2, and one unit in RNN, GRU
    and LSTM.

    Attributes:
        rms: root mean square of the channel's n entries of the state.
        largest: largest absolute value of these entries.
        energy: mean square of the mixer's output in this channel, over the tokens since the last
            measurement; behind the gated norm in Mamba-2, h in RNN, GRU and LSTM.
    """

    rms: Tensor
    largest: Tensor
    energy: Tensor


class Measurement(NamedTuple):
    """The statistics at one position.

    Attributes:
        position: number of tokens read.
        heads: by head, one entry per layer.
        channels: by channel, one entry per layer.
        loss: `(b,)` float64 on the CPU, mean loss in nats of the predictions after the tokens since
            the last measurement. The last token of a prompt predicts nothing; NaN where no
            prediction is left.
    """

    position: int
    heads: list[HeadStatistics]
    channels: list[ChannelStatistics]
    loss: Tensor


@torch.no_grad()
def read(
    model: EditableModel | Mitigated,
    tokens: Tensor,
    stops: Sequence[int],
    *,
    first: int,
    progress: Progress | None = None,
) -> Iterator[Measurement]:
    """Process prompts and yield the statistics at each of the given positions.

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
    loss = MeanLoss(len(tokens))
    wanted = set(stops)
    position = 0
    with _hooks(model.mixers) as outputs:
        for cut in sorted({*stops, first}):
            if cut > max(stops):
                break
            piece = tokens[:, position:cut].to(device)
            targets = tokens[:, position + 1 : cut + 1].to(device)
            for part in piece.split(scored_tokens(len(piece), plain.vocab_size), dim=1):
                logits, state = plain(part, state, edits=edits)
                loss.add(logits, targets[:, : part.shape[1]])
                targets = targets[:, part.shape[1] :]
            position = cut
            if progress is not None:
                progress.advance(piece.numel(), piece.numel())
            if cut == first:
                contributions = _memories(plain, state)
                state = _forget_recent(state) if watching else state
            if cut in wanted:
                memories = _memories(plain, state)
                heads, channels = [], []
                for layer, (memory, output) in enumerate(zip(memories, outputs, strict=True)):
                    norm, energy = output.take()
                    decays = state.extra[layer][-1] if watching else None
                    first_tokens = None if contributions is None else contributions[layer]
                    heads.append(_by_head(memory, decays, first_tokens, norm))
                    channels.append(_by_channel(memory, energy))
                yield Measurement(cut, heads, channels, loss.take())


def check(model: object) -> None:
    """Raise a UserError if the states of a model are not accessible."""
    if not isinstance(model, EditableModel | Mitigated):
        raise UserError(
            f"the states of a {type(model).__name__} cannot be read: give an RNN, GRU, LSTM or "
            "Mamba-2 model, or a hybrid with Mamba-2 layers, with or without a mitigation"
        )


def state_size(model: EditableModel | Mitigated) -> int:
    """Return the number of entries in the recurrent states of one row, over all layers."""
    check(model)
    plain = model.model if isinstance(model, Mitigated) else model
    return sum(memory.numel() for memory in _memories(plain, plain.init_state(1)))


def _by_head(
    memory: Tensor, decays: Decays | None, contribution: Tensor | None, output_norm: Tensor
) -> HeadStatistics:
    """Return the statistics of one layer; `memory` and `contribution` are `(b, h, p, n)`."""
    entries = memory.double().flatten(2)
    norm = entries.norm(dim=-1)
    retention = first_share = None
    if decays is not None:
        retention = decays.total.exp().mean(-1).cpu()
        left = entries
        if contribution is not None:
            left = contribution.double().flatten(2) * decays.recent.exp()
        first_share = (left.norm(dim=-1) / norm).cpu()
    variance = entries.var(dim=-1, correction=0)
    return HeadStatistics(
        entries.mean(-1).cpu(), variance.cpu(), norm.cpu(), retention, first_share, output_norm
    )


def _by_channel(memory: Tensor, energy: Tensor) -> ChannelStatistics:
    """Return the statistics of one layer: `memory` is `(b, h, p, n)`, `energy` is `(b, h · p)`."""
    wide = memory.double()
    return ChannelStatistics(
        wide.square().mean(-1).sqrt().cpu(),
        wide.abs().amax(-1).cpu(),
        energy.unflatten(-1, wide.shape[1:3]),
    )


def _watched(
    model: EditableModel | Mitigated,
) -> tuple[EditableModel, Sequence[Composed] | None, bool]:
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


def _memories(model: EditableModel, state: LMState) -> list[Tensor]:
    """Return the recurrent state of every layer, `(b, h, p, n)`; n is 1 in a stepwise cell."""
    found = []
    for mixer, layer in zip(model.mixers, model.mixer_states(state), strict=True):
        assert isinstance(mixer, ScanningMixer | StepwiseMixer)
        memory = mixer.memory(layer)
        found.append(memory if memory.dim() == 4 else memory[:, None, :, None])
    return found


@contextmanager
def _hooks(mixers: Sequence[Mixer]) -> Iterator[list[OutputMeans]]:
    outputs = [OutputMeans() for _ in mixers]
    handles = []
    try:
        for mixer, output in zip(mixers, outputs, strict=True):
            handles.append(mixer.register_forward_hook(output.see_output))
            handles.append(mixer.watch_channels(output.see_channels))
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
