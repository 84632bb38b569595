"""The interface of a mixer: (x, state) -> (y, state), one code path for any number of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from longrnn.errors import UserError
from longrnn.mixers.documents import run_documents
from longrnn.mixers.edits import Edit, EditedState, Steps
from longrnn.ops.native.layer import Layer, Norm
from longrnn.ops.packed_rows import PackedRows
from longrnn.ops.ssd import SSD, ScanInputs, on_device
from longrnn.registry import Registry
from longrnn.state import PyTree, leaves, reset, tree_map


class Mixer(nn.Module, ABC):
    """A recurrent cell over a whole sequence.

    The constructor of every cell takes `d_input`, the width of its input, and `d_model`, the width
    of its output; options are keyword-only.

    Attributes:
        n_heads: number of heads, the parts of a state that mitigations treat separately.
        recurrent_weights: names of the parameters that determine the recurrence;
            `longrnn diagnose gradients` and DataParallel need them.
        wide_weights: names of the parameters that are never cast to a narrower dtype.
        projections: names of the linear layers that may be replaced by others of the same sizes.
            A cell with some reads its input by the first one alone.
    """

    n_heads = 1
    recurrent_weights: tuple[str, ...] = ()
    wide_weights: tuple[str, ...] = ()
    projections: tuple[str, ...] = ()

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

    def run_packed(
        self, x: Tensor, state: PyTree, edit: Edit | None, carry: PyTree, rows: PackedRows
    ) -> tuple[Tensor, PyTree, PyTree]:
        """`run` for packed rows; outputs at padding are 0.

        This implementation suits every cell. Cells that can do so faster override it.
        """

        def run(x: Tensor, before: EditedState) -> tuple[Tensor, EditedState]:
            y, state, carry = self.run(x, before.state, edit, before.carry)
            return y, EditedState(state, carry)

        before, fresh = EditedState(state, carry), self._fresh(edit, carry)
        y, after = run_documents(run, x, before, fresh, rows)
        return y, after.state, after.carry

    def _fresh(self, edit: Edit | None, carry: PyTree) -> EditedState:
        """The initial state of one row, with the initial carry if `carry` holds anything."""
        initial = edit.init_carry(self, 1) if edit is not None and carry != () else ()
        return EditedState(self.init_state(1), initial)

    def forward(
        self,
        x: Tensor,
        state: PyTree,
        edit: Edit | None = None,
        rows: PackedRows | None = None,
    ) -> tuple[Tensor, PyTree]:
        """Runs the cell.

        Args:
            x: `(b, t, d_input)`, t >= 1.
            state: from `init_state` or an earlier call; it is not changed. With an edit that has a
                carry it is an `EditedState`.
            edit: changes or observes the recurrence.
            rows: where documents and padding begin; None for rows of one document without padding.
                Before the first token of a document, state and carry are the initial ones; padding
                changes neither, and its outputs are 0.

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
            y, own, carry = self._run(x, state.state, edit, state.carry, rows)
            return y, EditedState(own, carry)
        if edit is not None and edit.init_carry(self, 1) != ():
            raise UserError(
                f"{type(edit).__name__} remembers tokens and the state has no carry: give "
                "EditedState(state, edit.init_carry(mixer, batch_size))"
            )
        y, state, _ = self._run(x, state, edit, (), rows)
        return y, state

    def residual_layer(self, norm: Norm) -> Layer | None:
        """What the C++ kernel reads to compute x + run(norm(x)) for one token; None without one.

        Only modules among `projections` and attributes of the cell may be read.

        Args:
            norm: of x `(b, 1, d)`, d = d_input = d_model.
        """
        return None

    def _run(
        self, x: Tensor, state: PyTree, edit: Edit | None, carry: PyTree, rows: PackedRows | None
    ) -> tuple[Tensor, PyTree, PyTree]:
        if rows is None:
            return self.run(x, state, edit, carry)
        return self.run_packed(x, state, edit, carry, rows)

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
        # By name where there is one: a replica of DataParallel has no parameters, only attributes.
        names = self.recurrent_weights or [name for name, _ in self.named_parameters()]
        device = attrgetter(names[0])(self).device

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

    @abstractmethod
    def run(
        self,
        x: Tensor,
        state: PyTree,
        edit: Edit | None,
        carry: PyTree,
        rows: PackedRows | None = None,
    ) -> tuple[Tensor, PyTree, PyTree]:
        """`Mixer.run`, also for packed rows, with an edit that carries nothing."""

    def run_packed(
        self, x: Tensor, state: PyTree, edit: Edit | None, carry: PyTree, rows: PackedRows
    ) -> tuple[Tensor, PyTree, PyTree]:
        if any(True for _ in leaves(carry)):
            return super().run_packed(x, state, edit, carry, rows)
        # What carries nothing depends on earlier tokens through the recurrence alone, which a
        # log decay of −∞ restarts. A given state that is not finite is replaced beforehand, because
        # gradients would be multiplied by it.
        before = state
        if rows.starts_at_once:
            before = reset(state, self.init_state(len(x)), rows.is_start[:, 0])
        y, after, carried = self.run(x, before, edit, carry, rows)
        y = rows.without_padding(y)
        if rows.has_starts and not bool(y.isfinite().all()):
            # Only documents of their own do not see what others left: 0 times NaN is NaN.
            return super().run_packed(x, state, edit, carry, rows)
        return y, after, carried

    def recur(
        self,
        steps: Steps,
        B: Tensor,
        C: Tensor,
        state: Tensor,
        edit: Edit | None,
        carry: PyTree,
        rows: PackedRows | None = None,
    ) -> tuple[Tensor, Tensor, PyTree]:
        """Runs the recurrence, with an edit if there is one.

        Args:
            steps: see `Steps`.
            B: `(b, t, g, n)`.
            C: `(b, t, g, n)`.
            state: `(b, h, p, n)`.
            edit: its hooks are called stage by stage; None for none.
            carry: what the edit remembers.
            rows: where documents and padding begin; x must be 0 at padding.

        Returns:
            y `(b, t, h, p)`, the state after the last token, and the carry.
        """
        if edit is None:
            return *self.ssd(_packed(steps.inputs(B, C), rows), state), carry
        steps, carry = edit.edit_steps(steps, carry)
        inputs, carry = edit.edit_inputs(steps.inputs(B, C), carry)
        ssd = on_device(self.ssd, state.device)
        y, after, carry = edit.scan(_packed(inputs, rows), state, carry, ssd)
        if rows is not None and rows.has_padding:
            # An edit may change the state at every token, also where nothing is added to it.
            after = reset(after, state, rows.count == 0)
        return y, after, carry


def _packed(inputs: ScanInputs, rows: PackedRows | None) -> ScanInputs:
    """Inputs of a recurrence that restarts at documents and does not change at padding."""
    if rows is None:
        return inputs
    log_decay = rows.without_padding(inputs.log_decay)
    return inputs._replace(log_decay=log_decay.masked_fill(rows.is_start[..., None], -torch.inf))


MIXERS: Registry[Mixer] = Registry("mixer")
