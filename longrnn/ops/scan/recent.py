"""The inputs of the last tokens, which a state with a window remembers."""

from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from longrnn.state import History


class Recent(NamedTuple):
    """Inputs of the last tokens, at most w, flat by head or group; the newest is the last.

    Attributes:
        x: `(b, l, h p)`.
        gain: `(b, l, h)`.
        decay: `(b, l, h)`, the log decays or, where keys have rates of their own, the steps; other
            log decays per key are `(b, l, h n)`.
        B: `(b, l, g n)`.
    """

    x: History
    gain: History
    decay: History
    B: History


@dataclass
class _SharedMemory:
    """Memory of a `Recent`, `(b, tokens, …)` each, of which the first `used` tokens are written."""

    parts: list[Tensor]
    used: int


# The memory that `Recent.x` is a part of, and whose end it may reach.
_MEMORY_OF = WeakTensorKeyDictionary()
_LOCK = Lock()


def extended(recent: Recent, count: int, w: int) -> tuple[list[Tensor], Recent]:
    """Remembers `count` more tokens, of which the inputs are to be written.

    What a state holds is never written again: new tokens go after the end of every state that
    shares the memory. If another call has continued this state, its tokens are copied.

    Returns:
        The tokens of `recent` and the new ones, and the last w of them, all parts of one memory.
    """
    before = [history.entries for history in recent]
    known = before[0].shape[1]
    with _LOCK:
        memory: _SharedMemory | None = _MEMORY_OF.get(before[0])
        start = 0 if memory is None else int(before[0].storage_offset()) // before[0].shape[2]
        stop = start + known + count
        if memory is None or memory.used != start + known or stop > memory.parts[0].shape[1]:
            start, stop = 0, known + count
            capacity = stop + max(16, known // 4)
            memory = _SharedMemory([_copied(part, capacity) for part in before], stop)
        memory.used = stop
    first = max(start, stop - w)
    after = Recent(*(History(part[:, first:stop]) for part in memory.parts))
    _MEMORY_OF[after.x.entries] = memory
    return [part[:, start:stop] for part in memory.parts], after


def _copied(part: Tensor, capacity: int) -> Tensor:
    rows, known, width = part.shape
    with torch.inference_mode(False):  # a later call may write to it outside of this mode
        copied = torch.empty(rows, capacity, width, dtype=part.dtype, device=part.device)
    copied.data[:, :known] = part
    return copied
