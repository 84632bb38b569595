"""Statistics of the recurrent layers of a model on text: state norms, decays and step sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.cells.observe import StepRecord
from longrnn.diagnostics.settings import Settings
from longrnn.errors import UserError
from longrnn.evaluation.texts import Document
from longrnn.models import LanguageModel
from longrnn.models.finite import explain_nonfinite
from longrnn.progress import Progress
from longrnn.text import Tokenizer

# Tokens between two measurements of a state.
EVERY = 16
# A head is global if it retains more than this share of its first token at the end of the training
# length (arXiv 2504.16053).
GLOBAL = 0.05


class LayerStatistics(NamedTuple):
    """Statistics of one layer on `w` windows of `t` tokens.

    Attributes:
        norms: `(w, n, h)`, norm of each head's state after every EVERY tokens.
        log_decay: `(w, t, h)` float64; None for stepwise cells.
        dt: `(w, t, h)` float64, the step sizes; None for stepwise cells.
    """

    norms: Tensor
    log_decay: Tensor | None
    dt: Tensor | None

    def retention(self) -> Tensor:
        """Return the share of the first token that each head keeps, `(h,)`; 1 without decays."""
        if self.log_decay is None:
            return torch.ones(self.norms.shape[2])
        return self.log_decay.sum(1).mean(0).exp()

    def largest_norms(self, margin: float) -> list[float]:
        """Return the largest norm of each head's state times a margin, to six digits."""
        return [float(f"{margin * value:.6g}") for value in self.norms.flatten(0, 1).amax(0)]

    def step_quantiles(self, share: float) -> list[float]:
        """Return the step size of each head that at least this share of the steps do not exceed."""
        assert self.dt is not None
        # Head by head: `quantile` accepts at most 16 million numbers.
        limit = torch.stack([dt.quantile(share) for dt in self.dt.flatten(0, 1).unbind(1)])
        # Rounded up, so that the step size that equals the quantile is not above it.
        return (limit * (1 + 1e-6)).tolist()


@torch.no_grad()
def statistics(model: LanguageModel, windows: Tensor, quiet: bool = True) -> list[LayerStatistics]:
    """Return the statistics of every layer on windows of text.

    Args:
        model: a model with recurrent layers, without mitigation.
        windows: `(w, t)` tokens; each row starts from an empty state.
        quiet: show no progress.

    Raises:
        UserError: the logits after the windows are not finite.
    """
    norms: list[list[Tensor]] = [[] for _ in model.cells]
    records = [StepRecord() for _ in model.cells]
    pairs = zip(model.cells, records, strict=True)
    handles = [
        cell.recurrence.register_forward_hook(record.see) for cell, record in pairs if cell.scans
    ]
    state = model.init_state(len(windows))
    try:
        with Progress("calibration", windows.numel(), unit="tokens", quiet=quiet) as progress:
            for piece in windows.to(state.position.device).split(EVERY, dim=1):
                state = model(piece, state, keep=0).state
                for seen, memory in zip(norms, model.memories(state), strict=True):
                    seen.append(memory.double().flatten(2).norm(dim=-1))
                progress.advance(piece.numel(), piece.numel())
    finally:
        for handle in handles:
            handle.remove()
    last = windows[:, -1:].to(state.position.device)
    if not bool(model(last, state).logits.isfinite().all()):
        explain_nonfinite(model, windows)
    found = []
    for cell, record, seen in zip(model.cells, records, norms, strict=True):
        log_decay, dt = record.joined() if cell.scans else (None, None)
        found.append(LayerStatistics(torch.stack(seen, dim=1), log_decay, dt))
    return found


def windows(documents: Sequence[Document], length: int, most: int) -> Tensor:
    """Return at most `most` disjoint windows, `(w, length)`, spread evenly over the texts."""
    starts = [
        (document, start)
        for document in documents
        for start in range(0, len(document.tokens) - length + 1, length)
    ]
    if not starts:
        longest = max((len(document.tokens) for document in documents), default=0)
        raise UserError(
            f"the longest text has {longest:,} tokens and a window needs {length:,}: give more text"
        )
    chosen = (
        [starts[i * len(starts) // most] for i in range(most)] if len(starts) > most else starts
    )
    return torch.stack([document.tokens[start : start + length] for document, start in chosen])


class Job(NamedTuple):
    """What a calibration works on; `tokenizer` is that of the documents."""

    model: LanguageModel
    documents: Sequence[Document]
    settings: Settings
    tokenizer: Tokenizer
    quiet: bool

    def windows(self, length: int) -> Tensor:
        """Return windows of the documents, `(w, length)`."""
        return windows(self.documents, length, self.settings.windows)

    def inside(self) -> list[LayerStatistics]:
        """Return the statistics of every layer inside the training length."""
        return statistics(self.model, self.windows(self.settings.trained()), self.quiet)
