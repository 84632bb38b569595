"""Observes the recurrent states of a model while it reads prompts.

Prompts are rows of one batch, read in pieces that end at the positions of measurements. Nothing is
kept per token: states at these positions, and sums over the tokens between them, are enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.cells.observe import DecaySum, decay_sums
from longrnn.errors import UserError
from longrnn.inference.trie import scored_tokens
from longrnn.models import LanguageModel
from longrnn.progress import Progress


class LayerObservation(NamedTuple):
    """One layer at one position: `(b, h)` float64 on the CPU where nothing else is said.

    The state of a head is its p · n entries in Mamba-2; RNN, GRU and LSTM count as one head, whose
    state is the vector that recurs (c of an LSTM, h otherwise). The last three are NaN where the
    state is not a weighted sum over tokens: in an Elman cell, and under a mitigation that redefines
    the recurrence.

    Attributes:
        mean: of the entries.
        deviation: standard deviation of the entries.
        norm: Frobenius.
        channels: `(b, h, p)`, root mean square of the entries of each channel: a row of the p × n
            state of Mamba-2, a unit of RNN, GRU and LSTM.
        output_norm: `(b,)`, mean of ‖y‖ over the tokens since the last observation; y is the output
            of the cell.
        retention: what is left of the state before the first token, exp(Σ log decay); in an LSTM
            and a GRU the mean over units of the products of their gates.
        gate: geometric mean of the decay per token since the last observation.
        first_share: norm of what the first tokens contributed and is left, over `norm`; above 1
            where later tokens cancel it. 1 up to the end of the first tokens.
    """

    mean: Tensor
    deviation: Tensor
    norm: Tensor
    channels: Tensor
    output_norm: Tensor
    retention: Tensor
    gate: Tensor
    first_share: Tensor


class Observation(NamedTuple):
    """`position`: number of tokens read; `loss`: `(b,)`, mean loss in nats of the predictions after
    the tokens since the last observation, NaN where none is left."""

    position: int
    layers: list[LayerObservation]
    loss: Tensor


class _Layer:
    """What is remembered of one layer between observations."""

    def __init__(self, decays: DecaySum | None) -> None:
        self.decays = decays
        self.output_norm: Tensor | float = 0.0
        self.first: Tensor | None = None  # state after the first tokens, and the decays up to it
        self.first_total: Tensor | None = None
        self.last_total: Tensor | float = 0.0

    def see_output(self, module: nn.Module, args: Any, output: tuple[Tensor, Any]) -> None:
        self.output_norm = self.output_norm + output[0].double().norm(dim=-1).sum(1)

    def mark(self, memory: Tensor) -> None:
        """Remembers the present state as that of the first tokens."""
        if self.decays is not None:
            self.first, self.first_total = memory.double().flatten(2), self.decays.total

    def take(self, memory: Tensor, tokens: int) -> LayerObservation:
        """Describes the state `(b, h, p, n)`, `tokens` after the last observation."""
        wide = memory.double()
        entries = wide.flatten(2)
        norm = entries.norm(dim=-1)
        output_norm, self.output_norm = torch.as_tensor(self.output_norm) / tokens, 0.0
        retention = gate = share = torch.full_like(norm, math.nan)
        if self.decays is not None:
            total = self.decays.total
            assert total is not None  # tokens were read
            retention = total.exp().mean(-1)
            gate = ((total - self.last_total) / tokens).exp().mean(-1)
            self.last_total = total
            left = entries
            if self.first is not None and self.first_total is not None:
                # Decays are `(b, h, 1)` by head or `(b, 1, d)` by unit: both fit the flat state.
                left = self.first * (total - self.first_total).exp()
            share = left.norm(dim=-1) / norm
        found = (
            entries.mean(-1),
            entries.var(dim=-1, correction=0).sqrt(),
            norm,
            wide.square().mean(-1).sqrt(),
            output_norm,
            retention,
            gate,
            share,
        )
        return LayerObservation(*(one.cpu() for one in found))


@torch.no_grad()
def observe(
    model: LanguageModel,
    tokens: Tensor,
    stops: Sequence[int],
    *,
    first: int,
    progress: Progress | None = None,
) -> Iterator[Observation]:
    """Reads prompts and yields an observation at each of the given positions.

    Args:
        model: with or without a mitigation.
        tokens: `(b, t)`, the prompts.
        stops: positions, ascending, from 1 to t.
        first: number of first tokens for `LayerObservation.first_share`.
        progress: counts the tokens.

    Raises:
        UserError: a model without cells of longrnn.
    """
    check_observable(model)
    # Without decays nothing is observed, so that a plain cell can use its kernel.
    decays = decay_sums(model.cells) if _decays_are_defined(model) else None
    with ExitStack() as exits:
        sums = [None] * len(model.cells) if decays is None else exits.enter_context(decays)
        layers = [_Layer(one) for one in sums]
        for cell, layer in zip(model.cells, layers, strict=True):
            exits.callback(cell.register_forward_hook(layer.see_output).remove)
        state = model.init_state(len(tokens))
        position = last = 0
        losses: list[Tensor] = []
        for cut in sorted({*stops, first} - {0}):
            if cut > stops[-1]:
                break
            piece = tokens[:, position:cut].to(state.position.device)
            targets = tokens[:, position + 1 : cut + 1].to(piece.device)
            for part in piece.split(scored_tokens(len(piece), model.vocab_size), dim=1):
                logits, state = model(part, state)
                losses.append(_losses(logits, targets[:, : part.shape[1]]))
                targets = targets[:, part.shape[1] :]
            position = cut
            if progress is not None:
                progress.advance(piece.numel(), piece.numel())
            memories = model.memories(state)
            if cut == first:
                for layer, memory in zip(layers, memories, strict=True):
                    layer.mark(memory)
            if cut in stops:
                pairs = zip(layers, memories, strict=True)
                found = [layer.take(memory, cut - last) for layer, memory in pairs]
                yield Observation(cut, found, torch.cat(losses, 1).mean(1).cpu())
                losses, last = [], cut


def check_observable(model: LanguageModel) -> None:
    """Raises a UserError if a model has no cells of longrnn."""
    if not model.cells:
        kind = getattr(model, "kind", type(model).__name__)
        raise UserError(
            f"the states of a {kind} cannot be read: give a model of longrnn, or a hybrid with "
            "Mamba-2 or Gated DeltaNet layers"
        )


def state_size(model: LanguageModel) -> int:
    """Returns the number of entries of the recurrent states of one row, over all layers."""
    check_observable(model)
    return sum(memory.numel() for memory in model.memories(model.init_state(1)))


def _decays_are_defined(model: LanguageModel) -> bool:
    edits = [edit for edit in model.edits if edit is not None]
    redefined = any((edit.limit, edit.window) != (None, None) for edit in edits)
    return not redefined and all(cell.gated for cell in model.cells)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the losses in nats, `(b, t)` float64; logits may be of more tokens than targets."""
    wide = logits[:, : targets.shape[1]].to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.transpose(1, 2), targets, reduction="none").double()
