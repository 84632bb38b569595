"""Closed-form segment repetition: a segment is read once and changes the state as k readings would.

A head that keeps a key over a million tokens must leak less than 1e-6 per token, but the gradient
over a few thousand tokens gives it no reason to. With repetition, the gradient sees k times the
leak, and k times what the segment writes, at the cost of one reading. The inputs of each layer are
taken to be the same in every reading, which holds once the layers below have converged.
"""

from torch import Tensor

from longrnn.cells import ScanningCell
from longrnn.cells.observe import decay_sums
from longrnn.errors import UserError
from longrnn.models import LanguageModel, RecurrentLM, TrainableLM
from longrnn.ops.repeat import repeated
from longrnn.ops.rows import Rows
from longrnn.state import LMState


def can_repeat(model: LanguageModel) -> bool:
    """Whether the state of a model is in every layer a linear function of the previous one."""
    return isinstance(model, RecurrentLM) and all(
        isinstance(cell, ScanningCell)
        and cell.repeats
        and (edit is None or not edit.stages & {"limit", "window"})
        for cell, edit in zip(model.cells, model.edits, strict=True)
    )


def check_repeats(model: LanguageModel) -> None:
    """Raises a UserError for a model for which `can_repeat` is false."""
    if not can_repeat(model):
        raise UserError(
            "repeated segments need a model whose layers all have a linear recurrence, such as "
            "mamba2, without a mitigation that limits or windows its state: set max_repeat=1"
        )


def read_repeatedly(
    model: TrainableLM,
    tokens: Tensor,
    state: LMState,
    times: Tensor | None,
    rows: Rows | None = None,
) -> tuple[Tensor, LMState]:
    """`model.hidden(tokens, state)`, but with the state after `times` readings.

    Args:
        model: the model to train.
        tokens: `(b, t)`.
        state: before the first reading.
        times: `(b,)`, repetitions of each row; None for one.
        rows: where documents and padding begin; None for rows of one document.

    Raises:
        UserError: see `check_repeats`.
    """
    if times is None or bool((times == 1).all()):
        return model.hidden(tokens, state, rows=rows)
    assert rows is None  # repeated rows have one document, without padding
    check_repeats(model)
    with decay_sums(model.cells) as sums:
        hidden, once = model.hidden(tokens, state)
    layers = []
    for layer, (start, end) in enumerate(zip(state.layers, once.layers, strict=True)):
        total = sums[layer].to(end.ssm.dtype)
        layers.append(end._replace(ssm=repeated(start.ssm, end.ssm, total, times)))
    return hidden, once._replace(layers=tuple(layers))
