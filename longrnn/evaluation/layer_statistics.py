"""Statistics of the recurrent layers of a model on text: state norms, decays and step sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.cells.observe import StepRecord
from longrnn.models import LanguageModel
from longrnn.models.finite import explain_nonfinite
from longrnn.progress import Progress

# Tokens between two measurements of a state.
EVERY = 16


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
