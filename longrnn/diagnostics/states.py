"""Observes the recurrent states of a model while it reads texts, and diagnoses state collapse.

Texts are rows of one batch, read in pieces that end at the positions of observations. Nothing is
kept per token: states at these positions, and sums over the tokens between them, are enough.

The criterion of state collapse: statistics leave their range inside the training length.

At every observed position, the entries of a head's state have a mean, a standard deviation and a
Frobenius norm. Inside the training length each of the three has a range, which includes the zero
state at the start. A head collapses if, for one of the three, more than half of the observations
beyond the training length of the same text lie outside that range, widened on both sides: for
deviation and norm by MARGIN of its width, so that they must exceed 1.5 × their largest value
inside; for the mean by MARGIN of the largest root mean square of the entries inside, because
changes of a mean that is small relative to the entries are not significant.

A stationary head stays inside: more than half of its observations are near its median, which is not
above 1.5 × the largest value inside. A head that still fills up at the training length, as
1 − exp(−t/τ), leaves its range if it retains more than a third of its state over the training
length.

A head is global if its retention over the training length exceeds GLOBAL on any of the texts (the
criterion of arXiv 2504.16053).
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.cells.observe import decay_sums
from longrnn.data.batch import UNSCORED
from longrnn.errors import UserError
from longrnn.evaluation.texts import Document
from longrnn.models import LanguageModel
from longrnn.models.base import require_cells
from longrnn.models.finite import explain_nonfinite
from longrnn.progress import Progress
from longrnn.units import format_length

# A head is global if it retains more than this share of its state over the training length
# (arXiv 2504.16053).
GLOBAL = 0.05
# The share of a layer's channels that counts as the largest (arXiv 2410.07145 names outliers).
OUTLIERS = 0.01
# Tokens between observations, of which there are about MOST_OBSERVATIONS in a long text.
OBSERVED_EVERY, MOST_OBSERVATIONS = 128, 512
# Minimum number of observations inside the training length, which determine the ranges.
INSIDE = 16
MARGIN = 0.5
STATISTICS = ("mean", "deviation", "norm")
CRITERION = (
    "A head collapses if, at more than half of the positions beyond the training length of a text, "
    f"the norm or the standard deviation of its state is above {1 + MARGIN:g} × the largest inside "
    f"the training length, or the mean farther from its range there than {MARGIN:g} × the largest "
    "root mean square."
)


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

    @property
    def outliers(self) -> Tensor:
        """`(n, layers, b)`, the share of a layer's squared norm in its largest channels, `OUTLIERS`
        of all (at least one): near `OUTLIERS` if all are alike (arXiv 2410.07145)."""
        sizes = self.channels.square().flatten(3)
        largest = sizes.topk(math.ceil(OUTLIERS * sizes.shape[-1])).values
        return largest.sum(-1) / sizes.sum(-1)


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
        earlier: dict[int, Tensor] = {}
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
                since = [total - earlier.get(layer, 0) for layer, total in totals.items()]
                retention = torch.stack([total.exp().mean(-1) for total in totals.values()])
                gate = torch.stack([(gates / (stop - position)).exp().mean(-1) for gates in since])
                earlier = totals
            loss = losses.double().sum(1) / (target >= 0).sum(1).clamp(min=1)
            deviation, channels = entries.std(-1, correction=0), wide.square().mean(-1).sqrt()
            mean, at = entries.mean(-1), torch.tensor(stop)
            seen.append((at, loss, mean, deviation, norm, retention, gate, channels))
            position = stop
    return Observations(*(torch.stack(values).cpu() for values in zip(*seen, strict=True)))


class Finding(NamedTuple):
    """The result for one head on one text.

    Attributes:
        text: index.
        left: the statistics that left their range; the head collapses if there is one.
        onset: the first position beyond the training length at which one of these was outside.
        growth: the norm at the end relative to its largest value inside the training length.
        retention: over the training length; NaN if it is not defined.
    """

    layer: int
    head: int
    text: int
    left: tuple[str, ...]
    onset: int | None
    growth: float
    retention: float

    @property
    def rank(self) -> tuple[bool, float]:
        """A key for sorting: heads that collapse first, the fastest growing first."""
        return not self.left, -self.growth


class Diagnosis(NamedTuple):
    """The findings on all heads.

    Attributes:
        about: the settings, as at the top of diagnosis.yaml.
        seen: the observations.
        findings: per layer, head and text.
    """

    about: dict[str, Any]
    seen: Observations
    findings: list[Finding]

    def collapsing(self) -> list[tuple[int, int]]:
        """(layer, head) of the heads that collapse on any text, the fastest growing first."""
        ranked = sorted(self.findings, key=lambda finding: finding.rank)
        return list(dict.fromkeys((f.layer, f.head) for f in ranked if f.left))

    def global_heads(self) -> list[tuple[int, int]]:
        """(layer, head) of the heads that are global on any text."""
        return sorted({(f.layer, f.head) for f in self.findings if f.retention > GLOBAL})


def diagnose(
    model: LanguageModel,
    documents: Sequence[Document],
    length: int,
    *,
    train_length: int,
    checkpoint: str = "",
    quiet: bool = False,
) -> Diagnosis:
    """Read texts and diagnose every head.

    Args:
        model: with cells of longrnn, with or without a mitigation.
        documents: texts.
        length: number of tokens of each text to read.
        train_length: training length in tokens.
        checkpoint: name of the checkpoint, for the record.
        quiet: show no progress.

    Raises:
        UserError: the length does not exceed the training length, a text is too short, the model
            has no readable states, or logits are not finite inside the training length.
    """
    if length <= train_length:
        raise UserError(
            f"collapse shows beyond the training length of {format_length(train_length)}: "
            f"give a --length above it, not {format_length(length)}"
        )
    for document in documents:
        if len(document.tokens) < length:
            raise UserError(
                f"{document.name} has {len(document.tokens):,} tokens and {length:,} are needed: "
                "give a longer text or a smaller --length"
            )
    tokens = torch.stack([document.tokens[:length] for document in documents])
    every = max(OBSERVED_EVERY, length // MOST_OBSERVATIONS)
    dense = range(0, train_length, min(every, max(1, train_length // INSIDE)))
    stops = sorted({*dense[1:], *range(every, length, every), train_length, length})
    seen = observe(model, tokens, stops, trained=train_length, quiet=quiet)
    about: dict[str, Any] = {
        "checkpoint": checkpoint,
        "fingerprint": model.fingerprint(),
        "mitigation": None if model.mitigation is None else str(model.mitigation),
        "train_length": train_length,
        "length": length,
        "criterion": CRITERION,
        "collapse_level": 1 + MARGIN,
        "global_retention": GLOBAL,
        "outlier_share": OUTLIERS,
        "texts": [{"name": text.name, "sha256": text.sha256} for text in documents],
    }
    return Diagnosis(about, seen, find(seen, train_length))


def find(seen: Observations, train_length: int) -> list[Finding]:
    """Return one finding per layer, head and text.

    Args:
        seen: at ascending positions, some beyond the training length.
        train_length: in tokens.
    """
    at = seen.position
    inside = at <= train_length
    values = torch.stack([getattr(seen, name) for name in STATISTICS], 1)
    # A text starts from the zero state, so every range includes zero.
    low = values[inside].amin(0).clamp(max=0)
    high = values[inside].amax(0).clamp(min=0)
    reach = MARGIN * (high - low)
    reach[0] = MARGIN * values[inside, :2].square().sum(1).sqrt().amax(0)
    beyond = values[~inside]
    outside = ~((beyond >= low - reach) & (beyond <= high + reach))  # NaN counts as outside
    left = outside.double().mean(0) > 0.5
    onset = torch.where(outside, at[~inside].view(-1, 1, 1, 1, 1), at[-1] + 1).amin(0)
    retention = seen.retention[inside][-1]
    end = seen.norm[-1]
    # A head without state does not grow; one that overflows grows without limit.
    growth = torch.where(end == 0, 0.0, end / high[2]).nan_to_num(math.inf, math.inf)
    _, _, layers, texts, heads = values.shape
    findings = []
    for layer, head, text in product(range(layers), range(heads), range(texts)):
        flags = left[:, layer, text, head]
        finding = Finding(
            layer=layer,
            head=head,
            text=text,
            left=tuple(s for s, is_left in zip(STATISTICS, flags, strict=True) if is_left),
            onset=int(onset[:, layer, text, head][flags].min()) if flags.any() else None,
            growth=float(growth[layer, text, head]),
            retention=float(retention[layer, text, head]),
        )
        findings.append(finding)
    return findings
