"""The recurrence as matrix products over chunks, in plain torch (arXiv 2405.21060, section 6).

Notable choices:
- Time is cut into segments, and segments into chunks; only one segment's intermediate values exist
  at a time, so memory is bounded by the segment. The rest of a length that no chunk divides is a
  shorter chunk of its own: nothing is padded.
- Decays between two tokens of a chunk are differences of one running sum. The sum and the
  differences are float64: in float32 a single strongly forgetting token would cost the slow tokens
  behind it their digits.
- CHUNK and SEGMENT were chosen by `benchmarks/ssd_chunk_cpu.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.ops.ssd import reference
from longrnn.ops.ssd.base import ScanInputs

CHUNK = 64
SEGMENT = 1024


def ssd(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.ssd.base.SSD`."""
    time = inputs.x.shape[1]
    if time <= 2:
        return reference.ssd(inputs, state)
    outputs = []
    for start, stop, chunk in _pieces(time):
        piece = ScanInputs(*(tensor[:, start:stop] for tensor in inputs))
        y, state = _scan(piece, state, chunk)
        outputs.append(y)
    return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]), state


def _pieces(time: int) -> list[tuple[int, int, int]]:
    """(start, stop, chunk) of the pieces of `time` tokens; each is a multiple of its chunk."""
    whole = time - time % CHUNK
    pieces = [(s, min(s + SEGMENT, whole), CHUNK) for s in range(0, whole, SEGMENT)]
    if whole < time:
        pieces.append((whole, time, time - whole))
    return pieces


def _scan(inputs: ScanInputs, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """One piece. Below, m counts chunks, i and j tokens of a chunk, r heads of a group."""
    b, time, h, p = inputs.x.shape
    g, n = inputs.B.shape[2:]
    m, r = time // chunk, h // g
    x = inputs.x.to(state.dtype).reshape(b, m, chunk, h, p)
    B = inputs.B.to(state.dtype).reshape(b, m, chunk, g, n)
    C = inputs.C.to(state.dtype).reshape(b, m, chunk, g, n)
    log_decay = (
        inputs.log_decay.double().reshape(b, m, chunk, h).cumsum(2)
    )  # from the chunk's start

    # Within a chunk: attention-like products with the decay between j and i.
    between = log_decay.transpose(2, 3).contiguous()  # b m h i
    between = (between[..., :, None] - between[..., None, :]).to(state.dtype)  # b m h i j
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    between = between.masked_fill_(future, -torch.inf).exp_()
    scores = C.transpose(2, 3) @ B.permute(0, 1, 3, 4, 2)  # b m g i j
    weights = scores[:, :, :, None] * between.view(b, m, g, r, chunk, chunk)
    y = weights.view(b, m, h, chunk, chunk) @ x.transpose(2, 3)  # b m h i p

    # What each chunk adds to the state at its end, one product per group of heads.
    to_end = (log_decay[:, :, -1:] - log_decay).to(state.dtype).exp()  # b m j h
    added = (x * to_end[..., None]).view(b, m, chunk, g, r * p)
    added = added.permute(0, 1, 3, 4, 2) @ B.transpose(2, 3)  # b m g (r p) n
    added = added.view(b, m, h, p, n)

    # Across chunks: the state that each chunk starts from.
    whole = log_decay[:, :, -1].to(state.dtype).exp()[..., None, None]  # b m h 1 1
    starts = []
    for index in range(m):
        starts.append(state)
        state = torch.addcmul(added[:, index], whole[:, index], state)
    start = torch.stack(starts, dim=1).view(b, m, g, r * p, n)

    carried = (C.transpose(2, 3) @ start.transpose(3, 4)).transpose(2, 3)  # b m i g (r p)
    since_start = log_decay.to(state.dtype).exp()  # b m i h
    carried = carried.reshape(b, m, chunk, h, p) * since_start[..., None]
    return (carried + y.transpose(2, 3)).reshape(b, time, h, p), state
