"""Initialisations of the recurrence, selected by the `init` option of a cell.

A cell first draws its default weights, and the initialisation then overwrites some of them. So
`default` changes nothing, including the random numbers drawn afterwards. Each raises a `UserError`
for a kind of cell for which it is not defined.
"""

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor, nn

from longrnn.cells.base import Cell
from longrnn.cells.stepwise import StepwiseCell
from longrnn.cells.torch_cell import TorchCell
from longrnn.errors import UserError, nearest

# `long_memory` draws time scales uniformly between 2 and this number of tokens.
MAX_TIME_SCALE = 1024


def default(cell: Cell) -> None:
    """Keeps the default weights: the uniform draw of torch.nn, or the published draw of Mamba-2."""


def orthogonal(cell: Cell) -> None:
    """Orthogonal recurrent matrix for each gate: eigenvalues of modulus 1 (arXiv 1312.6120)."""
    _, weight_hh, _, _ = _weights(cell, "orthogonal")
    for block in weight_hh.split(cell.d_model):
        nn.init.orthogonal_(block)


def identity(cell: Cell) -> None:
    """Identity recurrent matrix and zero biases, which keep the state (arXiv 1504.00941)."""
    _, weight_hh, *biases = _weights(cell, "identity")
    if cell.gated:
        _refuse("identity", cell, "its gates decide what is kept; use long_memory")
    nn.init.eye_(weight_hh)
    for bias in biases:
        nn.init.zeros_(bias)


def xavier(cell: Cell) -> None:
    """Uniform matrices for each gate as in Glorot and Bengio (2010), and zero biases."""
    weight_ih, weight_hh, *biases = _weights(cell, "xavier")
    for block in (*weight_ih.split(cell.d_model), *weight_hh.split(cell.d_model)):
        nn.init.xavier_uniform_(block)
    for bias in biases:
        nn.init.zeros_(bias)


def long_memory(cell: Cell) -> None:
    """Time scales uniform between 2 and MAX_TIME_SCALE, per unit or head (arXiv 1804.11188).

    `Cell.init_time_scales` turns time scales into biases. For an LSTM and a GRU this is the chrono
    initialisation of the paper.
    """
    count = cell.d_model if isinstance(cell, StepwiseCell) else cell.n_heads
    if not cell.init_time_scales(torch.empty(count).uniform_(2, MAX_TIME_SCALE)):
        _refuse("long_memory", cell, "it has no gate that keeps its memory; use identity")


# Each overwrites weights of a newly built cell.
INITS: dict[str, Callable[[Cell], None]] = {
    "default": default,
    "orthogonal": orthogonal,
    "identity": identity,
    "xavier": xavier,
    "long_memory": long_memory,
}


def initialise(cell: Cell, init: str) -> None:
    """Applies the initialisation named `init`; called on the last line of a cell's constructor.

    Raises:
        UserError: an unknown name, or an initialisation that is not defined for the cell.
    """
    if init not in INITS:
        raise UserError(f"unknown init {init!r}: {nearest(init, INITS)}")
    INITS[init](cell)


def _weights(cell: Cell, init: str) -> list[Tensor]:
    """`weight_ih`, `weight_hh`, `bias_ih` and `bias_hh` of a cell with recurrent matrices."""
    if not isinstance(cell, TorchCell):
        _refuse(init, cell, "its state has no recurrent matrix, only decays; use long_memory")
    return [weight.detach() for weight in cell.cell.all_weights[0]]


def _refuse(init: str, cell: Cell, reason: str) -> NoReturn:
    raise UserError(f"init {init!r} is not defined for {cell.kind}: {reason}")
