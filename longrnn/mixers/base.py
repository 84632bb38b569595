"""The contract of a mixer: (x, state) -> (y, state), one code path for one token and for many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.ops.unroll import unroll
from longrnn.registry import Registry
from longrnn.state import PyTree, tree_map


class Update(NamedTuple):
    """What one token does to a stepwise cell's memory: memory ← keep ∘ memory + add.

    The memory is the vector that recurs: c of an LSTM, h of a GRU or an Elman cell.

    Attributes:
        add: `(b, d)`.
        keep: `(b, d)`; None where the new memory is no linear function of the old one (Elman), and
            `add` is then the new memory itself.
    """

    add: Tensor
    keep: Tensor | None

    def apply(self, memory: Tensor) -> Tensor:
        """The memory after the token, `(b, d)`."""
        return self.add if self.keep is None else torch.addcmul(self.add, self.keep, memory)


class Edit:
    """What a mitigation may change in one layer during one call; each hook is the identity here.

    A scanning mixer (Mamba-2) calls `edit_inputs` and `scan`, a stepwise one (RNN, GRU, LSTM)
    calls `edit_step`.
    """

    def edit_inputs(self, inputs: ScanInputs) -> ScanInputs:
        """Changes the inputs of the recurrence before it runs."""
        return inputs

    def scan(self, inputs: ScanInputs, state: Tensor, ssd: SSD) -> tuple[Tensor, Tensor]:
        """Runs the recurrence itself; `ssd` is the mixer's own backend."""
        return ssd(inputs, state)

    def edit_step(self, before: Tensor, after: Update) -> Update:
        """Changes what one token does to the memory `before`, `(b, d)`; the state and the output
        are read from the memory that results."""
        return after


class Mixer(nn.Module, ABC):
    """A recurrent cell over a whole sequence.

    Args of every member's constructor: `d_input`, the width it reads, and `d_model`, the width it
    writes; its options are keyword-only.

    Attributes:
        n_heads: parts of the state with a norm of their own.
        recurrent_weights: names of the parameters that make the recurrence what it is.
        wide_weights: names of the parameters that are never rounded to a narrower dtype.
    """

    n_heads = 1
    recurrent_weights: tuple[str, ...] = ()
    wide_weights: tuple[str, ...] = ()

    def __init__(self, d_input: int, d_model: int) -> None:
        super().__init__()
        self.d_input, self.d_model = d_input, d_model

    @abstractmethod
    def state_like(self) -> PyTree:
        """The state of one row without its batch axis, as tensors on the meta device."""

    @abstractmethod
    def forward(self, x: Tensor, state: PyTree, edit: Edit | None = None) -> tuple[Tensor, PyTree]:
        """Runs the cell.

        Args:
            x: `(b, t, d_input)`, t >= 1.
            state: as `init_state` or an earlier call gave it; it is not changed.
            edit: hooks of a mitigation.

        Returns:
            y `(b, t, d_model)` and the state after the last token.
        """

    def hold(self, scales: Tensor) -> bool:
        """Has a cell that was just built keep its memory for so many tokens, where it has a gate.

        Args:
            scales: `(d,)` of a stepwise cell, `(h,)` of a scanning one: tokens after which about
                1/e of a unit's or head's memory is left, at least 2.

        Returns:
            Whether the cell has such a gate.
        """
        return False

    def init_state(self, batch_size: int) -> PyTree:
        """The zero state of `batch_size` rows, on the parameters' device."""
        device = next(self.parameters()).device

        def zeros(leaf: Tensor) -> Tensor:
            return torch.zeros(batch_size, *leaf.shape, dtype=leaf.dtype, device=device)

        return tree_map(zeros, self.state_like())


class ScanningMixer(Mixer):
    """A cell whose recurrence is linear and can be scanned: h_t = exp(dt_t A) h_{t−1} + x_t B_t^T.

    Attributes:
        ssd: the implementation of the recurrence.
    """

    ssd: SSD

    @abstractmethod
    def rates(self) -> Tensor:
        """A, `(h,)`, below 0: log_decay = dt · A."""

    @abstractmethod
    def memory(self, state: PyTree) -> Tensor:
        """The part of a state that recurs, `(b, h, p, n)`."""

    @abstractmethod
    def inputs_like(self) -> ScanInputs:
        """What the scan is given for one token, without its batch axis, on the meta device."""


class StepwiseMixer(Mixer):
    """A cell that needs one token's state to compute the next: RNN, GRU, LSTM.

    Members hold a module of `torch.nn` (one layer, batch first), whose fused kernel runs when no
    edit asks for the states in between, and `step`, the same equations for one token.

    Attributes:
        gated: whether `Update.keep` exists: the new memory is linear in the old one, given gates.
    """

    cell: nn.RNNBase
    gated = True
    recurrent_weights = ("cell.weight_hh_l0",)

    @abstractmethod
    def fused(self, x: Tensor, state: PyTree) -> tuple[Tensor, PyTree]:
        """The whole sequence by the kernel of `torch.nn`."""

    @abstractmethod
    def memory(self, state: PyTree) -> Tensor:
        """The vector of a state that recurs, `(b, d)`."""

    @abstractmethod
    def step(self, projected: Tensor, state: PyTree) -> tuple[Update, Callable[[Tensor], PyTree]]:
        """One token, given its input projection `W_ih x + b_ih` of shape `(b, gates · d)`.

        Returns:
            What it does to the memory, and how the new state is read from the new memory.
        """

    def forward(self, x: Tensor, state: PyTree, edit: Edit | None = None) -> tuple[Tensor, PyTree]:
        if edit is None:
            return self.fused(x, state)

        def edited(token: Tensor, before: PyTree) -> PyTree:
            update, read = self.step(token, before)
            memory = self.memory(before)
            return read(edit.edit_step(memory, update).apply(memory))

        weight_ih, _, bias_ih, _ = self.cell.all_weights[0]
        projected = nn.functional.linear(x, weight_ih, bias_ih)
        return unroll(edited, lambda after: after.h, projected, state)

    def recurrent(self, h: Tensor) -> Tensor:
        """`W_hh h + b_hh`, `(b, gates · d)`."""
        _, weight_hh, _, bias_hh = self.cell.all_weights[0]
        return nn.functional.linear(h, weight_hh, bias_hh)

    def vector_like(self) -> Tensor:
        """One hidden vector on the meta device."""
        weight = self.cell.all_weights[0][0]
        return torch.empty(self.d_model, dtype=weight.dtype, device="meta")


MIXERS: Registry[Mixer] = Registry("mixer")
