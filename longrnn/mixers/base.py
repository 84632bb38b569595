"""The interface of a mixer: (x, state) -> (y, state), one code path for any number of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from longrnn.errors import UserError
from longrnn.mixers.edits import Edit, EditedState, Steps, Update
from longrnn.ops.precision import own_precision
from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.ops.unroll import unroll
from longrnn.registry import Registry
from longrnn.state import PyTree, tree_map


class Mixer(nn.Module, ABC):
    """A recurrent cell over a whole sequence.

    The constructor of every cell takes `d_input`, the width of its input, and `d_model`, the width
    of its output; options are keyword-only.

    Attributes:
        n_heads: number of heads, the parts of a state that mitigations treat separately.
        recurrent_weights: names of the parameters that determine the recurrence.
        wide_weights: names of the parameters that are never cast to a narrower dtype.
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
    def run(
        self, x: Tensor, state: PyTree, edit: Edit | None, carry: PyTree
    ) -> tuple[Tensor, PyTree, PyTree]:
        """Runs the cell; implemented by each cell and called by `forward`.

        Args:
            x: `(b, t, d_input)`, t >= 1.
            state: the cell's own state; it is not changed.
            edit: its hooks are called in the order that `longrnn.mixers.edits` defines; None for
                none.
            carry: what the edit remembers.

        Returns:
            y `(b, t, d_model)`, the state after the last token, and the carry.
        """

    def forward(self, x: Tensor, state: PyTree, edit: Edit | None = None) -> tuple[Tensor, PyTree]:
        """Runs the cell.

        Args:
            x: `(b, t, d_input)`, t >= 1.
            state: from `init_state` or an earlier call; it is not changed. With an edit that has a
                carry it is an `EditedState`.
            edit: changes or observes the recurrence.

        Returns:
            y `(b, t, d_model)` and the state after the last token, of the same type as `state`.

        Raises:
            UserError: the edit needs a carry and the state has none, or the reverse.
        """
        if isinstance(state, EditedState):
            if edit is None:
                raise UserError(
                    "this state has the carry of an edit and no edit was given: give the edit, or "
                    "the cell's own state, `state.state`"
                )
            y, own, carry = self.run(x, state.state, edit, state.carry)
            return y, EditedState(own, carry)
        if edit is not None and edit.init_carry(self, 1) != ():
            raise UserError(
                f"{type(edit).__name__} remembers tokens and the state has no carry: give "
                "EditedState(state, edit.init_carry(mixer, batch_size))"
            )
        y, state, _ = self.run(x, state, edit, ())
        return y, state

    def watch_channels(self, observe: Callable[[Tensor], None]) -> RemovableHandle:
        """Calls `observe` with the output by channel in every forward pass, until removed.

        Args:
            observe: gets `(b, t, channels)`. Each head has equally many channels, which are
                adjacent. A cell without output projection has one channel per entry of y; a cell
                with one gives the input of the projection, after any norm.
        """
        return self.register_forward_hook(lambda module, args, output: observe(output[0]))

    def init_time_scales(self, scales: Tensor) -> bool:
        """Initialises the gate that decides how long a new cell remembers, if it has one.

        Args:
            scales: `(d,)` for a stepwise cell, `(h,)` for a scanning one: number of tokens after
                which about 1/e of the memory of a unit or head is left, at least 2.

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
    """A cell whose recurrence can be scanned: h_t = exp(dt_t A) h_{t−1} + dt_t x_t B_t^T.

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
        """The inputs of the scan for one token, without batch axis, on the meta device."""

    def recur(
        self, steps: Steps, B: Tensor, C: Tensor, state: Tensor, edit: Edit | None, carry: PyTree
    ) -> tuple[Tensor, Tensor, PyTree]:
        """Runs the recurrence, with an edit if there is one.

        Args:
            steps: see `Steps`.
            B: `(b, t, g, n)`.
            C: `(b, t, g, n)`.
            state: `(b, h, p, n)`.
            edit: its hooks are called stage by stage; None for none.
            carry: what the edit remembers.

        Returns:
            y `(b, t, h, p)`, the state after the last token, and the carry.
        """
        if edit is None:
            return *self.ssd(steps.inputs(B, C), state), carry
        steps, carry = edit.edit_steps(steps, carry)
        inputs, carry = edit.edit_inputs(steps.inputs(B, C), carry)
        return edit.scan(inputs, state, carry, self.ssd)


class StepwiseMixer(Mixer):
    """A cell that computes one token after another: RNN, GRU, LSTM.

    A cell holds a `torch.nn` module (one layer, batch first), whose fused kernel runs when there is
    no edit, and implements `step`, the same equations for one token.

    Attributes:
        gated: whether `Update.keep` exists, that is, whether the new memory is linear in the old
            one, given the gates.
    """

    cell: nn.RNNBase
    gated = True
    recurrent_weights = ("cell.weight_hh_l0",)

    @abstractmethod
    def fused(self, x: Tensor, state: PyTree) -> tuple[Tensor, PyTree]:
        """Computes the whole sequence with the kernel of `torch.nn`."""

    @abstractmethod
    def memory(self, state: PyTree) -> Tensor:
        """The vector of a state that recurs, `(b, d)`."""

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
        # Autocast is off: a memory with 8 significant bits loses small additions.
        with own_precision(x):
            x = x.to(self.cell.all_weights[0][0].dtype)
            if edit is None:
                return *self.fused(x, state), carry
            return self._edited(x, state, edit, carry)

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

    def recurrent(self, h: Tensor) -> Tensor:
        """`W_hh h + b_hh`, `(b, gates · d)`."""
        _, weight_hh, _, bias_hh = self.cell.all_weights[0]
        return nn.functional.linear(h, weight_hh, bias_hh)

    def vector_like(self) -> Tensor:
        """A hidden vector of one row, on the meta device."""
        weight = self.cell.all_weights[0][0]
        return torch.empty(self.d_model, dtype=weight.dtype, device="meta")


MIXERS: Registry[Mixer] = Registry("mixer")
