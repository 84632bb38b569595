"""Objectives that train a recurrent memory beside attention, or in its place (`longrnn linearize`).

The teacher is the transformer that the memories were added to, so that they learn what the model
lacks of it, and not the style of the text.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from longrnn.checkpoints.load import load
from longrnn.checkpoints.names import CheckpointName
from longrnn.data import UNSCORED, Batch
from longrnn.errors import UserError
from longrnn.hf.attention_window import AttentionWindow
from longrnn.hf.windowed import WindowedAttention, WindowedCall
from longrnn.mitigations.spec import NONE
from longrnn.models import TrainableLM
from longrnn.ops.rows import Rows, positions_of
from longrnn.state import LMState
from longrnn.training.objective import Objective, StepOutput, rows_of, token_weights

# The key of a configuration with the transformer that a model was made of.
BASE_KEY = "longrnn_base"


class Lesson(NamedTuple):
    """What a teacher computes for rows.

    Attributes:
        logits: `(b, t, v)`, of tokens moved as by `Rows.arrange`, as everything else here; of the
            last token alone for `AttentionDifference`.
        inputs: of the memory of each layer that has one, `(b, t, d)`.
        outputs: that these are to return, likewise; none if nobody reads them.
    """

    logits: Tensor
    inputs: list[Tensor]
    outputs: list[Tensor]


class Distillation(Objective):
    """An objective whose rows a transformer reads too.

    Attributes:
        reads_attention: whether it is told what the memories are to return, and not the logits.

    Raises:
        UserError: the model is not one of `longrnn linearize`.
    """

    reads_attention = False

    def __init__(self, model: TrainableLM, *, recomputes: bool = False) -> None:
        super().__init__(model, recomputes=recomputes)
        student: Any = model
        base = getattr(getattr(student, "config", None), BASE_KEY, None)
        if getattr(student, "attention", None) is not None:
            self.teacher: Any = WithoutMemories(student, self.reads_attention)
        elif base is not None:
            self.teacher = Transformer(student, base, self.reads_attention)
        else:
            raise UserError(
                "a teacher reads what a window of attention removes, and this model has no window: "
                "start from a checkpoint of longrnn linearize"
            )

    def taught(self, batch: Batch) -> Lesson:
        """What the teacher computes for rows."""
        rows = rows_of(batch, slice(None))
        tokens = batch.tokens if rows is None else rows.arrange(batch.tokens)
        with torch.no_grad():
            return self.teacher.lesson(tokens, rows)


class Teacher(Distillation):
    """The cross-entropy between the predictions of the teacher and those of the model."""

    def _segment(self, segments: Sequence[Batch], state: LMState) -> StepOutput:
        (batch,) = segments
        expected, rows = self.taught(batch).logits.float(), rows_of(batch, slice(None))
        if rows is not None:
            expected = rows.restore(expected, batch.tokens.shape[1])
        expected = expected.softmax(-1)
        hidden, state = self.model.hidden(batch.tokens, state, rows=rows)
        logits = self.model.logits(hidden).float()
        losses = F.cross_entropy(logits.transpose(1, 2), expected.transpose(1, 2), reduction="none")
        unscored = batch.targets == UNSCORED
        predictions = logits.argmax(-1).masked_fill(unscored, UNSCORED)
        loss = (losses * token_weights(batch, losses.dtype)).sum()
        return StepOutput(loss[None], state, [predictions])


class AttentionDifference(Distillation):
    """The share of what is missing of attention that the memories lack.

    Each memory reads what the layer of the teacher reads, and is to return the difference between
    full attention and the window beside it; without a window, the attention itself. The loss is the
    squared error relative to the square of that, both weighted as the batch weights its tokens, as
    a mean over rows and layers: 1 at the start, when the memories return 0. Rows and layers of
    which the window removes nothing are left out; without any other, the loss is 0.
    """

    reads_attention = True

    def _segment(self, segments: Sequence[Batch], state: LMState) -> StepOutput:
        (batch,) = segments
        lesson, student, errors = self.taught(batch), cast(Any, self.model), []
        for block in (student.blocks[number] for number in student.layer_numbers):
            if isinstance(block, FSDPModule):
                block.unshard()  # its memory is called without it
        rows = rows_of(batch, slice(None))
        taught = zip(student.cells, student.edits, lesson.inputs, lesson.outputs, strict=True)
        for cell, edit, x, missing in taught:
            y, _ = cell(x, cell.init_state(len(x), edit), edit, rows)
            missing = missing.to(torch.promote_types(missing.dtype, torch.float32))
            weights = token_weights(batch, missing.dtype)
            weights = (weights if rows is None else rows.arrange(weights))[..., None]
            whole = (weights * missing.square()).sum((1, 2))
            lacking = (weights * (y - missing).square()).sum((1, 2))
            errors.append(torch.stack([lacking, whole]))
        lacking, whole = torch.cat(errors, 1)
        shares = lacking[whole != 0] / whole[whole != 0]
        return StepOutput((shares.sum() / max(1, len(shares)))[None], state, [])


class WithoutMemories:
    """Teaches what a model computes with full attention, without its memories and adapters.

    That is what the transformer computed to which the memories were added.

    Args:
        student: the model, under a window of attention; its weights are shared.
        reads_attention: see `Distillation`.
    """

    def __init__(self, student: Any, reads_attention: bool) -> None:
        self.student = student
        self.model: Any = student.under(None).attending(AttentionWindow())
        self.differences: Differences | None = None
        if reads_attention:
            self.differences = Differences(self.model, student.attention, student.layer_numbers)
            self.model.attention = self.differences

    def lesson(self, tokens: Tensor, rows: Rows | None) -> Lesson:
        """Read rows `(b, t)`."""
        state = self.model.init_state(len(tokens))
        with self.without_additions() as inputs:
            hidden, _ = self.model.segment(tokens, state, rows, None)
        if self.differences is None:
            return Lesson(self.model.logits(hidden), inputs, [])
        return Lesson(self.model.logits(hidden[:, -1:]), inputs, self.differences.taken)

    @contextmanager
    def without_additions(self) -> Iterator[list[Tensor]]:
        """A context in which each memory returns 0 uncomputed, and each adapter returns 0; yields
        the inputs of the memories that were called."""
        adapted: list[Any] = [part for part in self.student.modules() if hasattr(part, "lora_A")]
        inputs: list[Tensor] = []

        def silent(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            inputs.append(hidden_states)
            return torch.zeros_like(hidden_states)

        with ExitStack() as stack:
            for cell in self.student.cells:
                stack.enter_context(patch.object(cell.layer, "forward", silent))
            for part in adapted:
                part.scale_layer(0)
                stack.callback(part.unscale_layer)
            yield inputs


class Transformer:
    """Teaches what a transformer computes, some of whose attention a model has replaced.

    Args:
        student: the model.
        base: path of the transformer.
        reads_attention: see `Distillation`.
    """

    def __init__(self, student: Any, base: str, reads_attention: bool) -> None:
        name = CheckpointName.parse(base)._replace(mitigation=(NONE,), dtype=torch.float32)
        loaded: Any = load(name)
        self.model = loaded.to(student.device).attending(AttentionWindow()).requires_grad_(False)
        self.reads_attention = reads_attention
        layers = self.model.model.model.layers
        self.replaced = [layers[number].self_attn for number in student.layer_numbers]

    def lesson(self, tokens: Tensor, rows: Rows | None) -> Lesson:
        """Read rows `(b, t)`."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def record(layer: Any, args: Any, kwargs: Any, output: tuple[Tensor, Any]) -> None:
            inputs.append(kwargs["hidden_states"])
            outputs.append(output[0])

        state = self.model.init_state(len(tokens))
        keep = 1 if self.reads_attention else tokens.shape[1]
        handles = [layer.register_forward_hook(record, with_kwargs=True) for layer in self.replaced]
        try:
            logits, _ = self.model.call(tokens, state, keep, rows)
        finally:
            for handle in handles:
                handle.remove()
        return Lesson(logits, inputs, outputs)


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
        self._positions = positions_of(before, time, rows)[0]

    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Tensor:
        full = super().attend(layer, query, key, value, dict(options))
        number = self._attention.layers[layer].number
        if number not in self._numbers:
            return full
        windowed = self._windowed.attend(layer, query, key, value, dict(options))
        # Both are equal up to this position, except for rounding, and both have the bias.
        is_whole = self._positions <= self._windowed.calls[number].window.reach
        removed = (full - windowed).flatten(2).masked_fill(is_whole[..., None], 0)
        self._taken.append(layer.o_proj(removed) - layer.o_proj(torch.zeros_like(removed[:, :1])))
        return full
