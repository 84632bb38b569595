"""The recurrence of cells that scan, with the edits of a layer applied stage by stage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from longrnn.cells.base import Cell
from longrnn.cells.edit import Edit, Steps
from longrnn.errors import UserError
from longrnn.ops.backend import Backend
from longrnn.ops.rows import Rows
from longrnn.ops.scan.definition import ScanInputs
from longrnn.ops.window import Recent, no_tokens, state_of, windowed
from longrnn.state import PyTree, reset


class Scan(nn.Module):
    """Stage 3: the recurrence, with a limit of norms or a window. It has no weights."""

    def forward(
        self,
        inputs: ScanInputs,
        state: Tensor,
        recent: Recent | None,
        edit: Edit,
        ops: Backend,
        rows: Rows | None = None,
    ) -> tuple[Tensor, Tensor, Recent | None]:
        """Runs the recurrence.

        Args:
            inputs: after stage 2.
            state: `(b, h, p, n)`. The entries of windowed heads are neither read nor changed.
            recent: the last inputs of the windowed heads; None without a window.
            edit: `limit`, `window` and `heads` are read.
            ops: computes the plain recurrence and that with limits.
            rows: where documents and padding begin.

        Returns:
            y `(b, t, h, p)`, and state and last inputs after the last token.
        """
        if edit.window is None or recent is None:
            return *_plain(inputs, state, edit.limit, ops), recent
        if edit.heads is None:
            y, recent = windowed(inputs, recent, edit.window, ops.scan, rows)
            return y, state, recent
        inside, outside = _index(edit.heads, state), _index(~edit.heads, state)
        y_in, recent = windowed(inputs.heads(inside), recent, edit.window, ops.scan, rows)
        limit = None if edit.limit is None else edit.limit[..., outside]
        y_out, after = _plain(inputs.heads(outside), state.index_select(1, outside), limit, ops)
        y = torch.cat([y_in, y_out], 2).index_select(2, torch.cat([inside, outside]).argsort())
        return y, state.index_copy(1, outside, after), recent


def _index(heads: Tensor, like: Tensor) -> Tensor:
    """The numbers of the chosen heads, on the device of `like`."""
    return heads.nonzero()[:, 0].to(like.device)


def _plain(
    inputs: ScanInputs, state: Tensor, limit: Tensor | None, ops: Backend
) -> tuple[Tensor, Tensor]:
    return ops.scan(inputs, state) if limit is None else ops.limit(inputs, state, limit)


class ScanningCell(Cell):
    """A cell whose memory is a matrix by head, to which each token adds x_t B_tᵀ, read by C_t.

    Its output is the last of its `projections`, and the memory is the field `ssm` of its state.

    Attributes:
        backend: `auto`, or a name in `longrnn.ops.backend.BACKENDS`.
        repeats: whether reading the same inputs once more maps the memory in the same way, so that
            `longrnn.ops.repeat` gives the state after many readings.
    """

    scans = True
    has_steps = True
    repeats = True
    backend: str

    def __init__(self, d_input: int, d_model: int) -> None:
        super().__init__(d_input, d_model)
        self.recurrence = Scan()

    def inputs_like(self) -> ScanInputs:
        """The inputs of the scan for one row without tokens, on the device of the weights.

        A cell for which windows are not defined needs none.
        """
        raise TypeError(f"{type(self).__name__} has no windows")

    def own_memory(self, state: PyTree) -> Tensor:
        """`memory` without a window: the field `ssm` of a state."""
        return state.ssm

    def with_memory(self, state: PyTree, memory: Tensor) -> PyTree:
        """A state without a window, with another `memory`."""
        return state._replace(ssm=memory)

    @abstractmethod
    def run(
        self, x: Tensor, state: PyTree, edit: Edit | None, rows: Rows | None = None
    ) -> tuple[Tensor, PyTree]:
        """`forward`, except for a state before a document that is not finite."""

    def run_packed(
        self, x: Tensor, state: PyTree, edit: Edit | None, rows: Rows
    ) -> tuple[Tensor, PyTree]:
        # A log decay of −∞ restarts the recurrence, where nothing before it is NaN or infinite.
        initial = self.init_state(len(x), edit)
        before = reset(state, initial, rows.is_start[:, 0])
        y, after = self.run(x, before, edit, rows)
        if rows.has_starts and not bool(y.detach().sum().isfinite()):
            return super().run_packed(x, state, edit, rows)
        return rows.without_padding(y), after

    def scan(
        self,
        steps: Steps,
        inputs: Callable[[Steps, Tensor, Tensor | None], Any],
        state: PyTree,
        edit: Edit | None,
        ops: Backend,
        rows: Rows | None,
    ) -> tuple[Tensor, Tensor, Recent | None]:
        """Applies the stages of an edit.

        Args:
            steps: x must be 0 at padding.
            inputs: makes the inputs of `recurrence` from the edited steps, the log decays
                `(b, t, h)`, and the factors `(h,)` of what a token adds, or None.
            state: the memory `(b, h, p, n)`, and the last inputs if the edit has a window.
            edit: None for none.
            ops: of the call.
            rows: where documents and padding begin.
        """
        memory, recent = state
        edit = Edit() if edit is None else edit
        steps = edit.apply(steps)
        log_decay = steps.log_decay
        if rows is not None:
            log_decay = rows.without_padding(log_decay)
            log_decay = log_decay.masked_fill(rows.is_start[..., None], -torch.inf)
        given = inputs(steps, log_decay, steps.add)
        y, after, recent = self.recurrence(given, memory, recent, edit, ops, rows)
        if rows is not None and edit.limit is not None:
            # A limit may change a state where nothing is added to it.
            after = reset(after, memory, rows.count == 0)
        return y, after, recent

    def no_tokens(self, batch_size: int, edit: Edit) -> Recent:
        return no_tokens(self._windowed(edit), batch_size)

    def memory(self, state: PyTree, edit: Edit | None = None) -> Tensor:
        if edit is None or edit.window is None:
            return self.own_memory(state)
        windowed = state_of(state.recent, self._windowed(edit))
        if edit.heads is None:
            return windowed
        inside = _index(edit.heads, windowed)
        return self.own_memory(state.state).index_copy(1, inside, windowed)

    def _windowed(self, edit: Edit) -> ScanInputs:
        """`inputs_like` of the windowed heads."""
        like = self.inputs_like()
        return like if edit.heads is None else like.heads(_index(edit.heads, like.x))


def check_sizes(norm_eps: float, **sizes: int) -> None:
    """Raises a `UserError` for a size below 1, or an epsilon that is not valid in a norm."""
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name} must be at least 1, not {size}: set a positive number")
    if not (norm_eps >= 0 and isfinite(norm_eps)):
        raise UserError(f"norm_eps must be at least 0 and finite, not {norm_eps}: give 1e-5")


def divided(whole: int, meaning: str, **divisor: int) -> int:
    """`whole` by a size, or a `UserError` if that size does not divide it."""
    ((name, size),) = divisor.items()
    if whole % size:
        raise UserError(f"{name} {size} does not divide {meaning} {whole}: set another {name}")
    return whole // size
