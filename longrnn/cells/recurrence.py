"""The recurrence of a scanning cell, with stage 3 of an edit."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longrnn.cells.edit import Edit
from longrnn.ops.operation import Operation
from longrnn.ops.rows import Rows
from longrnn.ops.scan.inputs import ScanInputs
from longrnn.ops.scan.recent import Recent


class Memory(NamedTuple):
    """What recurs.

    Attributes:
        state: `(b, h, p, n)`. The entries of windowed heads are neither read nor changed.
        recent: the last inputs of the windowed heads; None without a window.
    """

    state: Tensor
    recent: Recent | None


class Recurrence(nn.Module):
    """Stage 3: the recurrence, with a limit of norms or a window. It has no weights."""

    def forward(
        self,
        inputs: Any,
        memory: Memory,
        edit: Edit,
        operation: Operation,
        backend: str,
        rows: Rows | None = None,
    ) -> tuple[Tensor, Memory]:
        """Runs the recurrence.

        Args:
            inputs: `ScanInputs` after stage 2.
            memory: before the first token.
            edit: `limit`, `window` and `heads` are read.
            operation: the plain recurrence.
            backend: see `Operation.choose`.
            rows: where documents and padding begin.

        Returns:
            y `(b, t, h, p)`, and the memory after the last token.
        """
        state, recent = memory
        if edit.window is None or recent is None:
            y, state = _plain(inputs, state, edit.limit, operation, backend)
            return y, Memory(state, recent)
        assert operation.windowed is not None
        windowed = operation.windowed.bound(backend)
        if edit.heads is None:
            y, recent = windowed(inputs, recent, edit.window, rows)
            return y, Memory(state, recent)
        inside, outside = head_index(edit.heads, state), head_index(~edit.heads, state)
        y_inside, recent = windowed(inputs.heads(inside), recent, edit.window, rows)
        limit = None if edit.limit is None else edit.limit[..., outside]
        others = state.index_select(1, outside)
        y_outside, others = _plain(inputs.heads(outside), others, limit, operation, backend)
        order = torch.cat([inside, outside]).argsort()
        y = torch.cat([y_inside, y_outside], 2).index_select(2, order)
        return y, Memory(state.index_copy(1, outside, others), recent)


def head_index(heads: Tensor, like: Tensor) -> Tensor:
    """The numbers of the chosen heads, on the device of `like`."""
    return heads.nonzero()[:, 0].to(like.device)


def _plain(
    inputs: ScanInputs, state: Tensor, limit: Tensor | None, operation: Operation, backend: str
) -> tuple[Tensor, Tensor]:
    if limit is None:
        return operation(backend, inputs, state)
    assert operation.limited is not None
    return operation.limited(backend, inputs, state, limit)
