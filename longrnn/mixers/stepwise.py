"""Cells that compute one token after another: RNN, GRU, LSTM."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from longrnn.mixers.base import Mixer
from longrnn.mixers.documents import run_packed_sequence
from longrnn.mixers.edits import Edit, EditedState, Update
from longrnn.ops import native as kernels
from longrnn.ops.linear import linear
from longrnn.ops.native import stepwise as native
from longrnn.ops.packed_rows import PackedRows
from longrnn.ops.precision import own_precision, refuse_tf32
from longrnn.ops.transforms import in_forward_mode
from longrnn.ops.unroll import unroll
from longrnn.state import PyTree

SequenceT = TypeVar("SequenceT", Tensor, PackedSequence)


class StepwiseMixer(Mixer):
    """A cell that computes one token after another: RNN, GRU, LSTM.

    A cell holds a `torch.nn` module (one layer, batch first), whose fused kernel runs when there is
    no edit, and implements `step`, the same equations for one token.

    Attributes:
        gated: whether `Update.keep` exists, that is, whether the new memory is linear in the old
            one, given the gates.
        has_kernel: whether the kernel of `cell` computes this cell.
        native_cell: its name among the C++ cells (`longrnn.ops.native.stepwise.CELLS`).
        native_first: whether the C++ cell is faster than the kernel of `cell`, where both run: on a
            CPU without gradients.
        packs_on_cpu: whether this kernel is the fastest for documents of several lengths on a CPU.
    """

    cell: nn.RNNBase
    gated = True
    has_kernel = True
    native_cell: str
    native_first = True
    packs_on_cpu = True
    recurrent_weights = ("cell.weight_hh_l0",)

    @abstractmethod
    def fused(self, x: SequenceT, state: PyTree) -> tuple[SequenceT, PyTree]:
        """Computes the whole sequence with the kernel of `torch.nn`.

        Called only if `has_kernel`.

        Args:
            x: `(b, t, d_input)`, or a `PackedSequence` of rows of several lengths, longest first.
            state: of the rows.
        """

    @abstractmethod
    def memory(self, state: PyTree) -> Tensor:
        """The vector of a state that recurs, `(b, d)`."""

    @abstractmethod
    def state_of(self, h: Tensor, memory: Tensor) -> PyTree:
        """The state with this output and this memory, `(b, d)` each."""

    @abstractmethod
    def step(self, projected: Tensor, state: PyTree) -> tuple[Update, Callable[[Tensor], PyTree]]:
        """Computes one token from its input projection `W_ih x + b_ih`, `(b, gates · d)`.

        Returns:
            The update of the memory, and a function from the new memory to the new state.
        """

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of all submodules except `cell`, which stays in training mode.

        cuDNN refuses the backward pass of an RNN in eval mode, so gradients through a model loaded
        for evaluation need this. Without dropout both modes compute the same values.
        """
        super().train(mode)
        self.cell.train()
        return self

    def run(
        self, x: Tensor, state: PyTree, edit: Edit | None, carry: PyTree
    ) -> tuple[Tensor, PyTree, PyTree]:
        refuse_tf32(x)
        # Autocast is off: a memory with 8 significant bits loses small additions.
        with own_precision(x):
            x = x.to(self.cell.all_weights[0][0].dtype)
            fused = edit is None and self.has_kernel and not in_forward_mode()
            edit = edit or Edit()
            found = None
            if self.native_first or not fused:
                found = self._native(x, state, edit, carry)
            if found is not None:
                return found
            return (*self.fused(x, state), carry) if fused else self._edited(x, state, edit, carry)

    def run_packed(
        self, x: Tensor, state: PyTree, edit: Edit | None, carry: PyTree, rows: PackedRows
    ) -> tuple[Tensor, PyTree, PyTree]:
        packs = self.has_kernel and (self.packs_on_cpu or x.device.type != "cpu")
        if edit is not None or not packs or in_forward_mode():
            return super().run_packed(x, state, edit, carry, rows)
        refuse_tf32(x)
        with own_precision(x):
            x = x.to(self.cell.all_weights[0][0].dtype)
            fresh = self.init_state(1)
            return *run_packed_sequence(self.fused, x, state, fresh, rows), carry

    def _native(
        self, x: Tensor, state: PyTree, edit: Edit, carry: PyTree
    ) -> tuple[Tensor, PyTree, PyTree] | None:
        """`_edited` in C++, for an edit that says what it does as data; None if not possible."""
        weight_ih, weight_hh, bias_ih, bias_hh = self.cell.all_weights[0]
        memory = self.memory(state)
        rule = edit.update_rule(carry)
        if rule is None or not native.suits(
            rule, x, weight_ih, weight_hh, bias_ih, bias_hh, state.h, memory
        ):
            return None
        projected = linear(x, weight_ih, bias_ih)
        after = native.run(self.native_cell, projected, weight_hh, bias_hh, state.h, memory, rule)
        return after.y, self.state_of(after.h, after.memory), edit.carry_after(carry, after.window)

    def _edited(
        self, x: Tensor, state: PyTree, edit: Edit, carry: PyTree
    ) -> tuple[Tensor, PyTree, PyTree]:
        """Computes one token after another, calling the hooks for each."""

        def edited(token: Tensor, before: EditedState) -> EditedState:
            update, read = self.step(token, before.state)
            update, carry = edit.edit_update(update, before.carry)
            memory, carry = edit.advance(self.memory(before.state), update, carry)
            return EditedState(read(memory), carry)

        weight_ih, _, bias_ih, _ = self.cell.all_weights[0]
        projected = nn.functional.linear(x, weight_ih, bias_ih)
        start = EditedState(state, carry)
        y, after = unroll(edited, lambda after: after.state.h, projected, start)
        return y, after.state, after.carry

    def extra_repr(self) -> str:
        ours = kernels.available() and next(self.cell.parameters()).device.type == "cpu"
        with_gradients = "torch.nn" if self.has_kernel else "one token after another"
        if not ours or (self.has_kernel and not self.native_first):
            return f"kernel={with_gradients}"
        return f"kernel=C++ without gradients, {with_gradients} with gradients"

    def recurrent(self, h: Tensor) -> Tensor:
        """`W_hh h + b_hh`, `(b, gates · d)`."""
        _, weight_hh, _, bias_hh = self.cell.all_weights[0]
        return nn.functional.linear(h, weight_hh, bias_hh)

    def vector_like(self) -> Tensor:
        """A hidden vector of one row, on the meta device."""
        weight = self.cell.all_weights[0][0]
        return torch.empty(self.d_model, dtype=weight.dtype, device="meta")
