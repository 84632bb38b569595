"""`Composed`: several edits of one layer as one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longrnn.errors import UserError
from longrnn.mixers.base import Mixer
from longrnn.mixers.edits import Edit, Steps, Update
from longrnn.ops.native.stepwise import UpdateRule
from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.ops.window import StepwiseCarry
from longrnn.state import PyTree


class Composed(Edit):
    """Several edits of one layer combined: stage by stage, and in list order within a stage.

    The carry is a tuple with the carry of each edit.

    Args:
        edits: at most one of them redefines the recurrence.

    Raises:
        UserError: two of them do.
    """

    def __init__(self, edits: Sequence[Edit]) -> None:
        self.edits = tuple(edits)
        last = [n for n, edit in enumerate(self.edits) if edit.redefines_recurrence]
        if len(last) > 1:
            raise UserError(
                f"{len(last)} edits redefine the recurrence of one layer, and only one can: "
                "give one of them"
            )
        self._last = last[0] if last else None

    @property
    def redefines_recurrence(self) -> bool:
        return self._last is not None

    def init_carry(self, mixer: Mixer, batch_size: int) -> PyTree:
        return tuple(edit.init_carry(mixer, batch_size) for edit in self.edits)

    def edit_steps(self, steps: Steps, carry: PyTree) -> tuple[Steps, PyTree]:
        carries = []
        for edit, own in zip(self.edits, carry, strict=True):
            steps, own = edit.edit_steps(steps, own)
            carries.append(own)
        return steps, tuple(carries)

    def edit_inputs(self, inputs: ScanInputs, carry: PyTree) -> tuple[ScanInputs, PyTree]:
        carries = []
        for edit, own in zip(self.edits, carry, strict=True):
            inputs, own = edit.edit_inputs(inputs, own)
            carries.append(own)
        return inputs, tuple(carries)

    def scan(
        self, inputs: ScanInputs, state: Tensor, carry: PyTree, ssd: SSD
    ) -> tuple[Tensor, Tensor, PyTree]:
        if self._last is None:
            return super().scan(inputs, state, carry, ssd)
        last = self._last
        y, state, own = self.edits[last].scan(inputs, state, carry[last], ssd)
        return y, state, (*carry[:last], own, *carry[last + 1 :])

    def edit_update(self, update: Update, carry: PyTree) -> tuple[Update, PyTree]:
        carries = []
        for edit, own in zip(self.edits, carry, strict=True):
            update, own = edit.edit_update(update, own)
            carries.append(own)
        return update, tuple(carries)

    def advance(self, memory: Tensor, update: Update, carry: PyTree) -> tuple[Tensor, PyTree]:
        if self._last is None:
            return super().advance(memory, update, carry)
        last = self._last
        memory, own = self.edits[last].advance(memory, update, carry[last])
        return memory, (*carry[:last], own, *carry[last + 1 :])

    def update_rule(self, carry: PyTree) -> UpdateRule | None:
        whole = UpdateRule()
        for edit, own in zip(self.edits, carry, strict=True):
            rule = edit.update_rule(own)
            if rule is None:
                return None
            whole = UpdateRule(
                keep=whole.keep * rule.keep,
                add=whole.add * rule.add,
                limit=min(whole.limit, rule.limit),
                window=whole.window or rule.window,
            )
        return whole

    def carry_after(self, carry: PyTree, window: StepwiseCarry | None) -> PyTree:
        # At most one edit redefines the recurrence, so at most one has a window.
        pairs = zip(self.edits, carry, strict=True)
        return tuple(edit.carry_after(own, window) for edit, own in pairs)
