"""Measures statistics of the states of a model while it processes prompts.

Notable choices:
- Nothing is kept per token: sums over tokens (`observers`) and the states at the positions of
  measurements are enough.
- Prompts are rows of one batch, processed in pieces that end at the positions of measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.diagnostics.observers import MeanLoss
from longrnn.diagnostics.readers import Kept, reader_of
from longrnn.inference.trie import scored_tokens
from longrnn.models import LanguageModel
from longrnn.progress import Progress


class HeadStatistics(NamedTuple):
    """Statistics of one layer at one position, each `(b, h)` float64 on the CPU; rows are prompts.

    The state of a head is its p · n entries in Mamba-2; RNN, GRU and LSTM count as one head, whose
    state is the vector that recurs (c of an LSTM, h otherwise).

    Attributes:
        mean: over the entries.
        variance: over the entries.
        norm: Frobenius.
        retention: what is left of the state before the first token, exp(Σ log decay); for an LSTM
            and a GRU the mean over units of the product of their gates. None where the state is
            not a weighted sum over tokens: in an Elman cell, and under a mitigation that redefines
            the recurrence.
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
    model: LanguageModel,
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
    reader = reader_of(model)
    contributions: list[Tensor] | None = None
    loss = MeanLoss(len(tokens))
    wanted = set(stops)
    position = 0
    with reader.watching() as outputs:
        state = reader.start(len(tokens))
        device = state.position.device
        for cut in sorted({*stops, first}):
            if cut > max(stops):
                break
            piece = tokens[:, position:cut].to(device)
            targets = tokens[:, position + 1 : cut + 1].to(device)
            for part in piece.split(scored_tokens(len(piece), model.vocab_size), dim=1):
                logits, state = reader.process(part, state)
                loss.add(logits, targets[:, : part.shape[1]])
                targets = targets[:, part.shape[1] :]
            position = cut
            if progress is not None:
                progress.advance(piece.numel(), piece.numel())
            if cut == first:
                contributions = reader.memories(state)
                reader.mark()
            if cut in wanted:
                memories = reader.memories(state)
                heads, channels = [], []
                for layer, (memory, output) in enumerate(zip(memories, outputs, strict=True)):
                    norm, energy = output.take()
                    first_tokens = None if contributions is None else contributions[layer]
                    kept = reader.kept(layer, first_tokens)
                    heads.append(_by_head(memory, kept, norm))
                    channels.append(_by_channel(memory, energy))
                yield Measurement(cut, heads, channels, loss.take())


def state_size(model: LanguageModel) -> int:
    """Return the number of entries in the recurrent states of one row, over all layers."""
    reader = reader_of(model)
    return sum(memory.numel() for memory in reader.memories(reader.start(1)))


def _by_head(memory: Tensor, kept: Kept | None, output_norm: Tensor) -> HeadStatistics:
    """Return the statistics of one layer; `memory` is `(b, h, p, n)`."""
    entries = memory.double().flatten(2)
    norm = entries.norm(dim=-1)
    retention = first_share = None
    if kept is not None:
        left = entries if kept.first is None else kept.first.double().flatten(2)
        retention = kept.retention.cpu()
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
