"""Time lapse: a segment that counts many times, so that short rows train long memories.

A head that keeps a key over a million tokens must leak less than 1e-6 a token, and a gradient that
sees a few thousand tokens has no reason to go there. Where a segment is read once and its effect on
the state is that of k readings, the same gradient sees k times the leak, and k times whatever the
segment writes, at the cost of one reading. What each layer reads is held to be the same in every
reading, which is so once the layers below have settled.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from longrnn.errors import UserError
from longrnn.mixers import Edit, Mixer, ScanningMixer
from longrnn.models import RecurrentLM
from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.ops.ssd.repeat import repeated
from longrnn.state import LMState
from longrnn.training.models import Trained


class Pass(NamedTuple):
    """How far one call has come.

    Attributes:
        before: `(b, h, p, n)`, the state before its first token.
        log_decay: `(b, h)`, summed over the tokens that were read.
        read: how many these are.
    """

    before: Tensor
    log_decay: Tensor
    read: int


class Repeat(Edit):
    """Lets one layer's inputs of one call count several times.

    Args:
        times: `(b,)`, how often each row's tokens count.
        tokens: of the call, which may come in pieces.
    """

    def __init__(self, times: Tensor, tokens: int) -> None:
        self.times, self.tokens = times, tokens

    def init_carry(self, mixer: Mixer, batch_size: int) -> Pass:
        assert isinstance(mixer, ScanningMixer)
        memory = mixer.memory(mixer.init_state(batch_size))
        return Pass(memory, memory.new_zeros(memory.shape[:2]), 0)

    def scan(
        self, inputs: ScanInputs, state: Tensor, carry: Pass, ssd: SSD
    ) -> tuple[Tensor, Tensor, Pass]:
        carry = Pass(
            before=carry.before if carry.read else state,
            log_decay=carry.log_decay + inputs.log_decay.sum(1),
            read=carry.read + inputs.x.shape[1],
        )
        y, state = ssd(inputs, state)
        if carry.read == self.tokens:
            state = repeated(carry.before, state, carry.log_decay, self.times)
        return y, state, carry


def read_repeatedly(
    model: Trained, tokens: Tensor, state: LMState, times: Tensor | None
) -> tuple[Tensor, LMState]:
    """`model.hidden(tokens, state)` with a state after as many readings as `times` says.

    Args:
        model: the model to train.
        tokens: `(b, t)`.
        state: before the first reading.
        times: `(b,)`, readings of each row; None for one.

    Raises:
        UserError: cells whose state is not a linear function of the one before.
    """
    if times is None or bool((times == 1).all()):
        return model.hidden(tokens, state)
    if not isinstance(model, RecurrentLM) or not all(
        isinstance(mixer, ScanningMixer) for mixer in model.mixers
    ):
        raise UserError(
            "segments that count several times need cells that are scanned, such as mamba2: set "
            "max_repeat=1"
        )
    edits = [Repeat(times, tokens.shape[1])] * len(model.mixers)
    start = state._replace(extra=model.init_carries(len(tokens), edits))
    hidden, after = model.hidden(tokens, start, edits=edits)
    return hidden, after._replace(extra=())
