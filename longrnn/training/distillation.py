"""Objectives that train a recurrent memory beside windows of attention (`longrnn linearize`).

The teacher is the model itself with full attention and without its memories, so that what it
computes for a row is what the transformer computed that the memories were added to. A memory that
learns from it learns what the window removes, and not the style of the text.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from longrnn.data import UNSCORED, Batch
from longrnn.errors import UserError
from longrnn.hf.attention_window import AttentionWindow
from longrnn.hf.windowed import WindowedAttention, WindowedCall
from longrnn.models import TrainableLM
from longrnn.ops.rows import Rows
from longrnn.state import LMState
from longrnn.training.objective import Objective, StepOutput, rows_of, token_weights


class Distillation(Objective):
    """An objective whose rows the teacher reads too.

    Attributes:
        teacher: the model with full attention; it shares the weights.

    Raises:
        UserError: the model has no window of attention.
    """

    def __init__(self, model: TrainableLM, *, recomputes: bool = False) -> None:
        super().__init__(model, recomputes=recomputes)
        student: Any = model
        if getattr(student, "attention", None) is None:
            raise UserError(
                "a teacher reads what a window of attention removes, and this model has no window: "
                "start from a checkpoint of longrnn linearize"
            )
        # In a tuple, because its weights are those of the model.
        self._teacher = (student.under(None).attending(AttentionWindow()),)

    @property
    def teacher(self) -> Any:
        """See the class."""
        return self._teacher[0]

    @contextmanager
    def without_additions(self) -> Iterator[list[Tensor]]:
        """A context in which each memory returns 0, and each adapter too; yields the inputs of the
        memories that ran."""
        adapted: list[Any] = [part for part in self.model.modules() if hasattr(part, "lora_A")]
        inputs: list[Tensor] = []

        def silence(layer: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            inputs.append(kwargs["hidden_states"])
            return torch.zeros_like(output)

        handles = [
            cell.layer.register_forward_hook(silence, with_kwargs=True)  # pyright: ignore
            for cell in self.model.cells
        ]
        for part in adapted:
            part.scale_layer(0)
        try:
            yield inputs
        finally:
            for handle in handles:
                handle.remove()
            for part in adapted:
                part.unscale_layer()

    def taught(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """What the teacher computes for rows: its hidden vectors and the inputs of the memories."""
        state = self.teacher.init_state(len(batch.tokens))
        with torch.no_grad(), self.without_additions() as inputs:
            hidden, _ = self.teacher.segment(batch.tokens, state, rows_of(batch, slice(None)), None)
        return hidden, inputs


class Teacher(Distillation):
    """The cross-entropy between the predictions of the teacher and those of the model."""

    def _segment(self, segments: Sequence[Batch], state: LMState) -> StepOutput:
        (batch,) = segments
        with torch.no_grad():
            expected = self.model.logits(self.taught(batch)[0]).float().softmax(-1)
        hidden, state = self.model.hidden(batch.tokens, state, rows=rows_of(batch, slice(None)))
        logits = self.model.logits(hidden).float()
        losses = F.cross_entropy(logits.transpose(1, 2), expected.transpose(1, 2), reduction="none")
        unscored = batch.targets == UNSCORED
        predictions = logits.argmax(-1).masked_fill(unscored, UNSCORED)
        loss = (losses * token_weights(batch, losses.dtype)).sum()
        return StepOutput(loss[None], state, [predictions])


class AttentionDifference(Distillation):
    """The share of what windows remove from attention that the memories beside them lack.

    Each memory reads what the layer of the teacher reads, and is to return the difference between
    full attention and its window. The loss is the squared error relative to the square of the
    difference, both weighted as the batch weights its tokens, as a mean over rows and layers: 1 at
    the start, when the memories return 0.
    """

    def __init__(self, model: TrainableLM, *, recomputes: bool = False) -> None:
        super().__init__(model, recomputes=recomputes)
        student: Any = model
        self.numbers = student.layer_numbers
        self.differences = Differences(self.teacher, student.attention, self.numbers)
        self.teacher.attention = self.differences

    def _segment(self, segments: Sequence[Batch], state: LMState) -> StepOutput:
        (batch,) = segments
        _, inputs = self.taught(batch)
        for block in (self.model.blocks[number] for number in self.numbers):
            if isinstance(block, FSDPModule):
                block.unshard()  # its memory is called without it
        rows, losses = rows_of(batch, slice(None)), []
        for cell, x, removed in zip(self.model.cells, inputs, self.differences.taken, strict=True):
            y, _ = cell(x, cell.init_state(len(x)), None, rows)
            removed = removed.to(torch.promote_types(removed.dtype, torch.float32))
            weights = token_weights(batch, removed.dtype)[..., None]
            whole = (weights * removed.square()).sum((1, 2))
            missing = (weights * (y - removed).square()).sum((1, 2))
            losses.append((missing / whole.clamp(min=torch.finfo(whole.dtype).tiny)).mean())
        return StepOutput(torch.stack(losses).mean()[None], state, [])


class Differences(WindowedAttention):
    """Full attention, which also records what a window would have removed from each layer.

    Args:
        teacher: the model with full attention.
        window: the attention of the student.
        numbers: of the layers with a memory.

    Attributes:
        taken: of the last call, the differences of each layer with a memory, `(b, t, d)`.
    """

    def __init__(self, teacher: Any, window: WindowedAttention, numbers: Sequence[int]) -> None:
        super().__init__(teacher, AttentionWindow())
        self.student, self.numbers = window, numbers
        self.taken: list[Tensor] = []

    def call(self, before: Tensor, time: int, rows: Rows | None) -> WindowedCall:
        """See `WindowedAttention.call`."""
        self.taken = []
        return _DifferenceCall(self, before, time, rows)


class _DifferenceCall(WindowedCall):
    def __init__(
        self, attention: Differences, before: Tensor, time: int, rows: Rows | None
    ) -> None:
        super().__init__(attention, before, time, rows)
        self._taken, self._numbers = attention.taken, attention.numbers
        self._windowed = attention.student.call(before, time, rows)

    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Tensor:
        full = super().attend(layer, query, key, value, dict(options))
        if self._attention.layers[layer].number not in self._numbers:
            return full
        windowed = self._windowed.attend(layer, query, key, value, dict(options))
        self._taken.append(layer.o_proj((full - windowed).flatten(2)))
        return full
