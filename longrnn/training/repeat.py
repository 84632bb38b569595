"""Closed-form segment repetition: a segment is read once and changes the state as k readings would.

A head that keeps a key over a million tokens must leak less than 1e-6 per token, but the gradient
over a few thousand tokens gives it no reason to. With repetition, the gradient sees k times the
leak, and k times what the segment writes, at the cost of one reading. The inputs of each layer are
taken to be the same in every reading, which holds once the layers below have converged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from longrnn.errors import UserError
from longrnn.mixers import Edit, Mixer, ScanningMixer, init_carries
from longrnn.models import RecurrentLM
from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.ops.ssd.repeat import repeated
from longrnn.state import LMState
from longrnn.training.models import Trained


class Progress(NamedTuple):
    """The progress within one call.

    Attributes:
        before: `(b, h, p, n)`, the state before its first token.
        log_decay: `(b, h)`, summed over the tokens read so far.
        read: number of tokens read so far.
    """

    before: Tensor
    log_decay: Tensor
    read: int


class Repeat(Edit):
    """Repeats the inputs of one layer in one call.

    Args:
        times: `(b,)`, repetitions of each row.
        tokens: number of tokens of the call, which may be processed in chunks.
    """

    def __init__(self, times: Tensor, tokens: int) -> None:
        self.times, self.tokens = times, tokens

    def init_carry(self, mixer: Mixer, batch_size: int) -> Progress:
        assert isinstance(mixer, ScanningMixer)
        memory = mixer.memory(mixer.init_state(batch_size))
        return Progress(memory, memory.new_zeros(memory.shape[:2]), 0)

    def scan(
        self, inputs: ScanInputs, state: Tensor, carry: Progress, ssd: SSD
    ) -> tuple[Tensor, Tensor, Progress]:
        carry = Progress(
            before=carry.before if carry.read else state,
            log_decay=carry.log_decay + inputs.log_decay.sum(1),
            read=carry.read + inputs.x.shape[1],
        )
        y, state = ssd(inputs, state)
        if carry.read == self.tokens:
            state = repeated(carry.before, state, carry.log_decay, self.times)
        return y, state, carry


def read_repeatedly(
    model: Trained,
    tokens: Tensor,
    state: LMState,
    times: Tensor | None,
    packing: Mapping[str, Tensor] | None = None,
    *,
    checked: bool = False,
) -> tuple[Tensor, LMState]:
    """`model.hidden(tokens, state)`, but with the state after `times` readings.

    Args:
        model: the model to train.
        tokens: `(b, t)`.
        state: before the first reading.
        times: `(b,)`, repetitions of each row; None for one.
        packing: further arguments of `model.hidden` for packed rows: `is_document_start` and
            `is_token`; None for rows of one document.
        checked: whether ids and state are known to be valid.

    Raises:
        UserError: a cell whose state is not a linear function of the previous one, or packed rows.
    """
    if times is None or bool((times == 1).all()):
        packing = packing or {}
        known: dict[str, Any] = {"checked": checked} if isinstance(model, RecurrentLM) else {}
        return model.hidden(
            tokens,
            state,
            is_document_start=packing.get("is_document_start"),
            is_token=packing.get("is_token"),
            **known,
        )
    if packing:
        raise UserError(
            "rows of several documents cannot be repeated: set max_repeat=1, or packing=false"
        )
    if not isinstance(model, RecurrentLM) or not all(
        isinstance(mixer, ScanningMixer) for mixer in model.mixers
    ):
        raise UserError(
            "repeated segments need cells with a linear recurrence, such as mamba2: set "
            "max_repeat=1"
        )
    edits = [Repeat(times, tokens.shape[1])] * len(model.mixers)
    start = state._replace(extra=init_carries(model.mixers, len(tokens), edits))
    hidden, after = model.hidden(tokens, start, edits=edits)
    return hidden, after._replace(extra=())
