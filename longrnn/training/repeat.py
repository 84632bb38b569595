"""Time lapse: a segment that counts many times, so that short rows train long memories.

A head that keeps a key over a million tokens must leak less than 1e-6 a token, and a gradient that
sees a few thousand tokens has no reason to go there. Where a segment is read once and its effect on
the state is that of k readings, the same gradient sees k times the leak, and k times whatever the
segment writes, at the cost of one reading. What each layer reads is held to be the same in every
reading, which is so once the layers below have settled.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longrnn.errors import UserError
from longrnn.mixers import Edit, Mixer, ScanningMixer
from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.ops.ssd.repeat import repeated


class Repeat(Edit):
    """Lets one layer's inputs of one call count several times. It serves one call only.

    Args:
        times: `(b,)`, how often each row's tokens count.
        tokens: of the call, which may come in pieces.
    """

    def __init__(self, times: Tensor, tokens: int) -> None:
        self.times, self.left = times, tokens
        self.before: Tensor | None = None
        self.log_decay: Tensor | None = None

    def scan(self, inputs: ScanInputs, state: Tensor, ssd: SSD) -> tuple[Tensor, Tensor]:
        before = state if self.before is None else self.before
        decay = inputs.log_decay.sum(1)
        self.before = before
        self.log_decay = decay if self.log_decay is None else self.log_decay + decay
        self.left -= inputs.x.shape[1]
        y, state = ssd(inputs, state)
        if self.left == 0:
            state = repeated(before, state, self.log_decay, self.times)
        return y, state


def repeats(mixers: Sequence[Mixer], times: Tensor | None, tokens: int) -> list[Repeat] | None:
    """The edits of one call; None where nothing counts more than once.

    Raises:
        UserError: cells whose state is no linear function of the one before.
    """
    if times is None or bool((times == 1).all()):
        return None
    if not all(isinstance(mixer, ScanningMixer) for mixer in mixers):
        raise UserError(
            "segments that count several times need cells that are scanned, such as mamba2: set "
            "max_repeat=1"
        )
    return [Repeat(times, tokens) for _ in mixers]
