"""Statistics of the recurrent layers of a model on text: state norms, decays and step sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.mixers import Edit, ScanningMixer, Steps, StepwiseMixer
from longrnn.models import EditableModel
from longrnn.models.finite import explain_nonfinite
from longrnn.progress import Progress
from longrnn.state import PyTree

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
def statistics(model: EditableModel, windows: Tensor, quiet: bool = True) -> list[LayerStatistics]:
    """Return the statistics of every layer on windows of text.

    Args:
        model: a model with recurrent layers.
        windows: `(w, t)` tokens; each row starts from an empty state.
        quiet: show no progress.

    Raises:
        UserError: the logits after the windows are not finite.
    """
    recorders = [_Recorder()] * len(model.mixers)
    state = model.init_state(len(windows), recorders)
    norms: list[list[Tensor]] = [[] for _ in model.mixers]
    with Progress("calibration", windows.numel(), unit="tokens", quiet=quiet) as progress:
        for piece in windows.to(state.position.device).split(EVERY, dim=1):
            state = model(piece, state, keep=0, edits=recorders).state
            layers = model.mixer_states(state)
            for seen, mixer, layer in zip(norms, model.mixers, layers, strict=True):
                assert isinstance(mixer, ScanningMixer | StepwiseMixer)
                memory = mixer.memory(layer).double()
                seen.append(memory.unflatten(1, (mixer.n_heads, -1)).flatten(2).norm(dim=-1))
            progress.advance(piece.numel(), piece.numel())
    last = windows[:, -1:].to(state.position.device)
    if not bool(model(last, state._replace(extra=())).logits.isfinite().all()):
        explain_nonfinite(model, windows)
    found = []
    for recorded, seen in zip(state.extra, norms, strict=True):
        log_decay = dt = None
        if recorded:
            steps, rates = zip(*recorded, strict=True)
            dt = torch.cat(steps, dim=1).double()
            log_decay = dt * rates[0].double()
        found.append(LayerStatistics(torch.stack(seen, dim=1), log_decay, dt))
    return found


class _Recorder(Edit):
    """Records (dt, A) of a scanning cell in its carry, one entry per call."""

    def edit_steps(self, steps: Steps, carry: PyTree) -> tuple[Steps, PyTree]:
        return steps, (*carry, (steps.dt, steps.A))
