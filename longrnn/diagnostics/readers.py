"""Readers: how the recurrent states of a kind of model are read while it processes prompts.

A reader processes tokens, returns the state of every head, and says how much of an earlier state is
left. `reader_of` returns the reader of a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.diagnostics.observers import DecayRecorder, OutputMeans
from longrnn.errors import UserError
from longrnn.mitigations import Mitigated
from longrnn.mixers import Composed, Edit, Mixer, ScanningMixer, StepwiseMixer
from longrnn.models import EditableModel
from longrnn.models.base import LMOutput
from longrnn.state import LMState


class Kept(NamedTuple):
    """What is left of earlier states of one layer.

    Attributes:
        retention: of the state before the first token, `(b, h)` float64.
        first: of the state at `Reader.mark`, in the shape of the memory; None before that.
    """

    retention: Tensor
    first: Tensor | None


class Reader(ABC):
    """Reads the recurrent states of one model.

    Attributes:
        n_layers: number of recurrent layers.
        n_heads: number of heads per layer.
    """

    n_layers: int
    n_heads: int

    @abstractmethod
    def watching(self) -> AbstractContextManager[list[OutputMeans]]:
        """Return a context in which the outputs of the layers are added up, one entry per layer."""

    @abstractmethod
    def start(self, batch_size: int) -> LMState:
        """Return the state before the first token."""

    @abstractmethod
    def process(self, tokens: Tensor, state: LMState) -> LMOutput:
        """Process tokens `(b, t)`."""

    @abstractmethod
    def memories(self, state: LMState) -> list[Tensor]:
        """Return the recurrent state of every layer, `(b, h, p, n)`; n is 1 in a stepwise cell."""

    @abstractmethod
    def mark(self, state: LMState) -> LMState:
        """Return a state from which on `Kept.first` refers to the present memories."""

    @abstractmethod
    def kept(self, state: LMState, layer: int, marked: Tensor | None) -> Kept | None:
        """Return what is left of earlier states; None where this is not defined.

        Args:
            state: the present state.
            layer: index of the layer.
            marked: the memory of the layer at `mark`; None before that.
        """


class CellReader(Reader):
    """Reads models whose cells are those of longrnn, with or without a mitigation.

    Args:
        model: the model.
    """

    def __init__(self, model: EditableModel | Mitigated) -> None:
        self.model, own = (
            (model.model, model.edits) if isinstance(model, Mitigated) else (model, None)
        )
        self.mixers = model.mixers
        self.n_layers, self.n_heads = len(self.mixers), self.mixers[0].n_heads
        # Where decays are not defined nothing is recorded, so that a plain cell can use its kernel.
        self.recorded = _decays_are_defined(self.mixers, own)
        self.edits: Sequence[Edit] | None = own
        if self.recorded:
            first: Sequence[Edit] = own or [Edit()] * self.n_layers
            self.edits = [Composed([edit, DecayRecorder()]) for edit in first]

    @contextmanager
    def watching(self) -> Iterator[list[OutputMeans]]:
        outputs = [OutputMeans() for _ in self.mixers]
        handles = []
        try:
            for mixer, output in zip(self.mixers, outputs, strict=True):
                handles.append(mixer.register_forward_hook(output.see_output))
                handles.append(mixer.watch_channels(output.see_channels))
            yield outputs
        finally:
            for handle in handles:
                handle.remove()

    def start(self, batch_size: int) -> LMState:
        return self.model.init_state(batch_size, self.edits)

    def process(self, tokens: Tensor, state: LMState) -> LMOutput:
        return self.model(tokens, state, edits=self.edits)

    def memories(self, state: LMState) -> list[Tensor]:
        found = []
        for mixer, layer in zip(self.mixers, self.model.mixer_states(state), strict=True):
            assert isinstance(mixer, ScanningMixer | StepwiseMixer)
            memory = mixer.memory(layer)
            found.append(memory if memory.dim() == 4 else memory[:, None, :, None])
        return found

    def mark(self, state: LMState) -> LMState:
        if not self.recorded:
            return state
        extra = tuple(
            (own, decays._replace(recent=torch.zeros_like(decays.recent)))
            for own, decays in state.extra
        )
        return state._replace(extra=extra)

    def kept(self, state: LMState, layer: int, marked: Tensor | None) -> Kept | None:
        if not self.recorded:
            return None
        decays = state.extra[layer][-1]
        first = None
        if marked is not None:
            # Decays are `(b, h, 1)` by head or `(b, 1, d)` by unit: both fit the flat memory.
            left = marked.double().flatten(2) * decays.recent.exp()
            first = left.view_as(marked)
        return Kept(decays.total.exp().mean(-1), first)


def reader_of(model: object) -> Reader:
    """Return the reader of a model.

    Raises:
        UserError: the states of such a model cannot be read.
    """
    if isinstance(model, EditableModel | Mitigated):
        return CellReader(model)
    # Only other models need transformers, whose import takes seconds.
    from longrnn.diagnostics.delta_reader import DeltaReader
    from longrnn.hf.adapter import HFLanguageModel
    from longrnn.hf.delta import has_delta_layers

    kind = type(model).__name__
    if isinstance(model, HFLanguageModel):
        if has_delta_layers(model):
            return DeltaReader(model)
        kind = f"Hugging Face {model.kind}"
    raise UserError(
        f"the states of a {kind} cannot be read: give an RNN, GRU, LSTM or Mamba-2 model, or a "
        "hybrid with Mamba-2 or Gated DeltaNet layers"
    )


def _decays_are_defined(mixers: Sequence[Mixer], edits: Sequence[Edit] | None) -> bool:
    if any(edit.redefines_recurrence for edit in edits or ()):
        return False
    return all(not isinstance(mixer, StepwiseMixer) or mixer.gated for mixer in mixers)
