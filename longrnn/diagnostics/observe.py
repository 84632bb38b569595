"""Observes the recurrent states of a model while it reads texts, for diagnosis and calibration.

Texts are rows of one batch, read in pieces that end at the positions of observations. Nothing is
kept per token: states at these positions, and sums over the tokens between them, are enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.cells.observe import decay_sums
from longrnn.data.batch import UNSCORED
from longrnn.models import LanguageModel
from longrnn.models.base import require_cells
from longrnn.models.finite import explain_nonfinite
from longrnn.progress import Progress

# A head is global if it retains more than this share of its state over the training length
# (arXiv 2504.16053).
GLOBAL = 0.05


class Observations(NamedTuple):
    """All layers at n positions: `(n, layers, b, h)` float64 on the CPU unless stated otherwise.

    The state of a head is its p · n entries in Mamba-2; RNN, GRU and LSTM count as one head, whose
    state is the vector that recurs (c of an LSTM, h otherwise). Retention and gate are NaN where
    the state is not a weighted sum over tokens: in an Elman cell, and under a mitigation that
    redefines the recurrence.

    Attributes:
        position: `(n,)`, number of tokens read.
        loss: `(n, b)`, mean in nats of the predictions after the tokens since the last observation;
            0 if there are none.
        mean: of the entries.
        deviation: standard deviation of the entries.
        norm: Frobenius.
        retention: what is left of the state before the first token, exp(Σ log decay): with decays
            per key the mean over keys; in an LSTM and a GRU the mean over units of the products of
            their gates.
        gate: geometric mean of the decay per token since the last observation, and the mean of it
            over keys or units.
        channels: `(n, layers, b, h, p)`, root mean square of the entries of each channel: a row of
            the p × n state of Mamba-2, a unit of RNN, GRU and LSTM.
    """

    position: Tensor
    loss: Tensor
    mean: Tensor
    deviation: Tensor
    norm: Tensor
    retention: Tensor
    gate: Tensor
    channels: Tensor


@torch.no_grad()
def observe(
    model: LanguageModel,
    tokens: Tensor,
    stops: Sequence[int],
    *,
    trained: int = 0,
    quiet: bool = True,
) -> Observations:
    """Read texts and observe the states at the given positions.

    Args:
        model: with or without a mitigation.
        tokens: `(b, t)`.
        stops: positions, ascending, from 1 to t.
        trained: the training length; up to it, logits must be finite.
        quiet: show no progress.

    Raises:
        UserError: a model without cells of longrnn, or logits that are not finite.
    """
    require_cells(model)
    targets = F.pad(tokens[:, 1:], (0, 1), value=UNSCORED)
    state, position = model.init_state(len(tokens)), 0
    device = state.position.device
    # Without decays nothing is observed, so that a plain cell can use its kernel.
    edits = [edit for edit in model.edits if edit is not None]
    redefined = any((edit.limit, edit.window) != (None, None) for edit in edits)
    gated = not redefined and all(cell.gated for cell in model.cells)
    seen = []
    progress = Progress("states", tokens.numel(), unit="tokens", quiet=quiet)
    with decay_sums(model.cells if gated else []) as sums, progress:
        before: dict[int, Tensor] = {}
        for stop in stops:
            piece = tokens[:, position:stop].to(device)
            target = targets[:, position:stop].to(device)
            losses, state = model.token_losses(piece, target, state)
            progress.advance(piece.numel(), piece.numel())
            # Beyond the training length a state that overflows is a finding.
            if stop <= trained and not bool(losses.isfinite().all()):
                explain_nonfinite(model, tokens[:, :stop])
            wide = torch.stack(model.memories(state)).double()
            entries = wide.flatten(3)
            norm = entries.norm(dim=-1)
            retention = gate = torch.full_like(norm, math.nan)
            if sums:
                # By key, unit or head; layers may differ in this.
                totals = dict(sums)
                since = [total - before.get(layer, 0) for layer, total in totals.items()]
                retention = torch.stack([total.exp().mean(-1) for total in totals.values()])
                gate = torch.stack([(gates / (stop - position)).exp().mean(-1) for gates in since])
                before = totals
            loss = losses.double().sum(1) / (target >= 0).sum(1).clamp(min=1)
            deviation, channels = entries.std(-1, correction=0), wide.square().mean(-1).sqrt()
            mean, at = entries.mean(-1), torch.tensor(stop)
            seen.append((at, loss, mean, deviation, norm, retention, gate, channels))
            position = stop
    return Observations(*(torch.stack(values).cpu() for values in zip(*seen, strict=True)))
