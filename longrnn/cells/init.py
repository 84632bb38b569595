"""Initialisations of the recurrence, selected by the `init` option of a cell.

A cell first draws its default weights, and the initialisation then overwrites some of them. So
`default` changes nothing, including the random numbers drawn afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn

import torch
from torch import Tensor, nn

from longrnn.cells.base import Cell
from longrnn.cells.stepwise import StepwiseCell
from longrnn.cells.torch_cell import TorchCell
from longrnn.errors import UserError
from longrnn.registry import Registry

# `long_memory` draws time scales uniformly between 2 and this number of tokens.
MAX_TIME_SCALE = 1024


class Init(ABC):
    """Overwrites weights of a newly built cell."""

    @abstractmethod
    def apply(self, cell: Cell) -> None:
        """Changes the cell in place.

        Raises:
            UserError: not defined for this kind of cell.
        """


INITS: Registry[Init] = Registry("init")


@INITS.register("default")
class Default(Init):
    """Keeps the default weights: the uniform draw of torch.nn, or the published draw of Mamba-2."""

    def apply(self, cell: Cell) -> None:
        return


@INITS.register("orthogonal")
class Orthogonal(Init):
    """Orthogonal recurrent matrix for each gate: eigenvalues of modulus 1 (arXiv 1312.6120)."""

    def apply(self, cell: Cell) -> None:
        _, weight_hh, _, _ = _weights(cell, "orthogonal")
        for block in weight_hh.split(cell.d_model):
            nn.init.orthogonal_(block)


@INITS.register("identity")
class Identity(Init):
    """Identity recurrent matrix and zero biases, which keep the state (arXiv 1504.00941)."""

    def apply(self, cell: Cell) -> None:
        _, weight_hh, *biases = _weights(cell, "identity")
        if cell.gated:
            _refuse("identity", cell, "its gates decide what is kept; use long_memory")
        nn.init.eye_(weight_hh)
        for bias in biases:
            nn.init.zeros_(bias)


@INITS.register("xavier")
class Xavier(Init):
    """Uniform matrices for each gate as in Glorot and Bengio (2010), and zero biases."""

    def apply(self, cell: Cell) -> None:
        weight_ih, weight_hh, *biases = _weights(cell, "xavier")
        for block in (*weight_ih.split(cell.d_model), *weight_hh.split(cell.d_model)):
            nn.init.xavier_uniform_(block)
        for bias in biases:
            nn.init.zeros_(bias)


@INITS.register("long_memory")
class LongMemory(Init):
    """Time scales uniform between 2 and MAX_TIME_SCALE, per unit or head (arXiv 1804.11188).

    `Cell.init_time_scales` turns time scales into biases. For an LSTM and a GRU this is the chrono
    initialisation of the paper.
    """

    def apply(self, cell: Cell) -> None:
        count = cell.d_model if isinstance(cell, StepwiseCell) else cell.n_heads
        if not cell.init_time_scales(torch.empty(count).uniform_(2, MAX_TIME_SCALE)):
            _refuse("long_memory", cell, "it has no gate that keeps its memory; use identity")


def initialise(cell: Cell, init: str) -> None:
    """Applies the initialisation named `init`; called on the last line of a cell's constructor.

    Raises:
        UserError: an unknown name, or an initialisation that is not defined for the cell.
    """
    INITS[init]().apply(cell)


def _weights(cell: Cell, init: str) -> list[Tensor]:
    """`weight_ih`, `weight_hh`, `bias_ih` and `bias_hh` of a cell with recurrent matrices."""
    if not isinstance(cell, TorchCell):
        _refuse(init, cell, "its state has no recurrent matrix, only decays; use long_memory")
    return [weight.detach() for weight in cell.cell.all_weights[0]]


def _refuse(init: str, cell: Cell, reason: str) -> NoReturn:
    raise UserError(f"init {init!r} is not defined for {cell.kind}: {reason}")
