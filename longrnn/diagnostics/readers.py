"""Readers: how the recurrent states of a kind of model are read while it processes prompts.

A reader processes tokens, returns the state of every head, and says how much of an earlier state is
left. `reader_of` returns the reader of a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from torch import Tensor

from longrnn.cells import Cell, Edit
from longrnn.cells.observe import DecaySum, decay_sums
from longrnn.diagnostics.observers import OutputMeans
from longrnn.errors import UserError
from longrnn.models import LanguageModel, LMOutput
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
    def mark(self) -> None:
        """Let `Kept.first` refer to the present memories from now on."""

    @abstractmethod
    def kept(self, layer: int, marked: Tensor | None) -> Kept | None:
        """Return what is left of earlier states; None where this is not defined.

        Args:
            layer: index of the layer.
            marked: the memory of the layer at `mark`; None before that.
        """


class CellReader(Reader):
    """Reads models whose cells are those of longrnn, with or without a mitigation.

    Args:
        model: the model.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.cells = model, model.cells
        self.n_layers, self.n_heads = len(self.cells), self.cells[0].n_heads
        # Where decays are not defined nothing is observed, so that a plain cell can use its kernel.
        self.observed = _decays_are_defined(self.cells, model.edits)
        self._sums: list[DecaySum] = []
        self._marked: list[Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[list[OutputMeans]]:
        outputs = [OutputMeans() for _ in self.cells]
        handles = []
        with decay_sums(self.cells if self.observed else []) as self._sums:
            try:
                for cell, output in zip(self.cells, outputs, strict=True):
                    handles.append(cell.register_forward_hook(output.see_output))
                    handles.append(cell.watch_channels(output.see_channels))
                yield outputs
            finally:
                for handle in handles:
                    handle.remove()

    def start(self, batch_size: int) -> LMState:
        return self.model.init_state(batch_size)

    def process(self, tokens: Tensor, state: LMState) -> LMOutput:
        return self.model(tokens, state)

    def memories(self, state: LMState) -> list[Tensor]:
        return self.model.memories(state)

    def mark(self) -> None:
        self._marked = [one.total for one in self._sums if one.total is not None]

    def kept(self, layer: int, marked: Tensor | None) -> Kept | None:
        if not self.observed:
            return None
        total, first = self._sums[layer].total, None
        assert total is not None, "tokens were processed"
        if marked is not None:
            # Decays are `(b, h, 1)` by head or `(b, 1, d)` by unit: both fit the flat memory.
            left = marked.double().flatten(2) * (total - self._marked[layer]).exp()
            first = left.view_as(marked)
        return Kept(total.exp().mean(-1), first)


def reader_of(model: LanguageModel) -> Reader:
    """Return the reader of a model.

    Raises:
        UserError: the states of such a model cannot be read.
    """
    if model.cells:
        return CellReader(model)
    kind = getattr(model, "kind", type(model).__name__)
    raise UserError(
        f"longrnn cannot read the states of this {kind}: give an RNN, GRU, LSTM or Mamba-2 model, "
        "or a hybrid with Mamba-2 layers"
    )


def _decays_are_defined(cells: Sequence[Cell], edits: Sequence[Edit | None]) -> bool:
    if any(edit is not None and (edit.limit, edit.window) != (None, None) for edit in edits):
        return False
    return all(cell.gated for cell in cells)
