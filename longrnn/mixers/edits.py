"""`Edit`: the hooks through which the recurrence of a cell is changed or observed.

Mitigations, diagnostics and segment repetition all use these hooks. A cell calls them in a fixed
order, so several edits of one layer compose stage by stage (`longrnn.mixers.composed`):

| stage | scanning cells, once per call | stepwise cells, once per token |
| --- | --- | --- |
| 1 | `edit_steps`: the step dt and the rate A | |
| 2 | `edit_inputs`: gain = dt and log_decay = dt · A, times multipliers | `edit_update` |
| 3 | `scan`: the recurrence | `advance`: the new memory |

An edit whose hooks only multiply by constants, limit a norm or keep a window also says so as data
(`update_rule`): without gradients a stepwise cell then runs in C++ instead of calling the hooks
once per token.

An edit is immutable. What it remembers from token to token is its carry, which every hook takes and
returns. It stores options and masks of heads, and nothing that depends on weights: the hooks get
such values, for example A, as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from longrnn.ops.native.stepwise import UpdateRule
from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.ops.window import StepwiseCarry
from longrnn.state import PyTree

if TYPE_CHECKING:
    from longrnn.mixers.base import Mixer


class Steps(NamedTuple):
    """What a scanning cell computes the inputs of its recurrence from.

    Attributes:
        x: `(b, t, h, p)`, not yet multiplied by dt.
        dt: `(b, t, h)`, the step, at least 0, in the dtype of the state.
        A: `(h,)`, the rate, below 0, in the dtype of the state.
    """

    x: Tensor
    dt: Tensor
    A: Tensor

    def inputs(self, B: Tensor, C: Tensor) -> ScanInputs:
        """Inputs of the recurrence: gain = dt and log_decay = dt · A."""
        return ScanInputs(self.x, self.dt, self.dt * self.A, B, C)


class Update(NamedTuple):
    """How one token changes a stepwise cell's memory: memory ← keep ∘ memory + add.

    The memory is the recurrent vector: c of an LSTM, h of a GRU or an Elman cell.

    Attributes:
        add: `(b, d)`.
        keep: `(b, d)`; None where the new memory is not a linear function of the old one (Elman);
            `add` is then the new memory itself.
    """

    add: Tensor
    keep: Tensor | None

    def apply(self, memory: Tensor) -> Tensor:
        """The memory after the token, `(b, d)`."""
        return self.add if self.keep is None else torch.addcmul(self.add, self.keep, memory)


class EditedState(NamedTuple):
    """The state of a cell that runs with an edit.

    Attributes:
        state: the cell's own state.
        carry: what the edit remembers, from `Edit.init_carry` or an earlier call.
    """

    state: PyTree
    carry: PyTree


class Edit:
    """Changes or observes the recurrence of one layer; each hook is the identity by default.

    Every hook takes the carry and returns its result and the new carry. No hook changes an argument
    in place.
    """

    def __init_subclass__(cls) -> None:
        """Makes sure that a class with new hooks does not inherit the rule of the old ones."""
        super().__init_subclass__()
        own = vars(cls)
        if "update_rule" not in own and ("edit_update" in own or "advance" in own):
            cls.update_rule = _no_rule  # type: ignore[method-assign]

    def init_carry(self, mixer: Mixer, batch_size: int) -> PyTree:
        """The carry before the first token; every leaf has `batch_size` rows."""
        return ()

    def edit_steps(self, steps: Steps, carry: PyTree) -> tuple[Steps, PyTree]:
        """Stage 1 of a scanning cell: changes the step dt and the rate A."""
        return steps, carry

    def edit_inputs(self, inputs: ScanInputs, carry: PyTree) -> tuple[ScanInputs, PyTree]:
        """Stage 2 of a scanning cell: multiplies the decays and the inputs of the recurrence."""
        return inputs, carry

    def scan(
        self, inputs: ScanInputs, state: Tensor, carry: PyTree, ssd: SSD
    ) -> tuple[Tensor, Tensor, PyTree]:
        """Stage 3 of a scanning cell: runs the recurrence; `ssd` is the backend of the cell.

        Returns:
            y `(b, t, h, p)`, the state after the last token, and the carry.
        """
        y, state = ssd(inputs, state)
        return y, state, carry

    def edit_update(self, update: Update, carry: PyTree) -> tuple[Update, PyTree]:
        """Stage 2 of a stepwise cell: multiplies `keep` and `add` of one token."""
        return update, carry

    def advance(self, memory: Tensor, update: Update, carry: PyTree) -> tuple[Tensor, PyTree]:
        """Stage 3 of a stepwise cell: computes the memory after one token from that before it.

        The cell computes its state and its output from the result.
        """
        return update.apply(memory), carry

    def update_rule(self, carry: PyTree) -> UpdateRule | None:
        """What `edit_update` and `advance` do, as data; None if only the hooks can do it.

        A subclass with other hooks has no rule unless it overrides this method too.
        """
        return UpdateRule()

    def carry_after(self, carry: PyTree, window: StepwiseCarry | None) -> PyTree:
        """The carry after tokens that were computed by `update_rule`.

        Args:
            carry: before these tokens.
            window: the window of the rule after them.
        """
        return carry

    @property
    def redefines_recurrence(self) -> bool:
        """Whether stage 3 is overridden, which at most one edit of a layer may do."""
        return type(self).scan is not Edit.scan or type(self).advance is not Edit.advance


def init_carries(
    mixers: Sequence[Mixer], batch_size: int, edits: Sequence[Edit]
) -> tuple[PyTree, ...]:
    """The carry of each layer's edit before the first token."""
    pairs = zip(mixers, edits, strict=True)
    return tuple(edit.init_carry(mixer, batch_size) for mixer, edit in pairs)


def _no_rule(edit: Edit, carry: PyTree) -> UpdateRule | None:
    """The `update_rule` of an edit whose hooks must be called."""
    return None
