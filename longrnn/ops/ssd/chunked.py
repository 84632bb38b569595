"""The recurrence as matrix products over chunks, in plain torch (arXiv 2405.21060, section 6).

Notable choices:
- Time is cut into segments, and segments into chunks; only one segment's intermediate values exist
  at a time, so memory is bounded by the segment. The rest of a length that no chunk divides is a
  shorter chunk of its own: nothing is padded.
- Decays between two tokens of a chunk are differences of one running sum, kept in float64 or as
  two float32 halves: in one float32 a single strongly forgetting token would cost the slow tokens
  behind it their digits.
- What multiplies the state, a token's decay or a whole chunk's, is kept as 0 or 1 plus a rest: one
  float32 near 1, rounded the same way again and again, would let a long memory drift.
- No decay below e^FLOOR is computed: it is 0, and float32 numbers smaller still are denormal, which
  makes `exp` and the products up to 60 times slower on a CPU.
- Rows in which something is not finite are computed again, one token after another: see
  `longrnn.ops.ssd.rows`.
- CHUNK and SEGMENT were chosen by `benchmarks/ssd_chunk_cpu.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.precision import own_precision
from longrnn.ops.ssd.base import ScanInputs
from longrnn.ops.ssd.rows import all_finite, apart, finite_rows

CHUNK = 64
SEGMENT = 512
# So few tokens go one by one, which is faster than the products of a chunk.
FEW = 2
FLOOR = -80.0


def ssd(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.ssd.base.SSD`."""
    with own_precision(state):
        y, final = _in_pieces(inputs, state)
        # Every token's input and state are read by its output.
        if all_finite(y):
            return y, final
        finite = finite_rows(y)
        if bool(finite.all()):
            return y, final
        return apart(finite, _in_pieces, _one_by_one, inputs, state)


def _in_pieces(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence where everything is finite."""
    time = inputs.x.shape[1]
    if time == 1:
        return _token(inputs, state)
    outputs = []
    for start, stop, chunk in _pieces(time):
        piece = ScanInputs(*(tensor[:, start:stop] for tensor in inputs))
        y, state = _scan(piece, state, chunk) if stop - start > 1 else _token(piece, state)
        outputs.append(y)
    return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]), state


def _pieces(time: int) -> list[tuple[int, int, int]]:
    """(start, stop, chunk) of the pieces of `time` tokens; each is a multiple of its chunk."""
    whole = time - time % CHUNK
    pieces = [(s, min(s + SEGMENT, whole), CHUNK) for s in range(0, whole, SEGMENT)]
    if time - whole > FEW:
        return [*pieces, (whole, time, time - whole)]
    return pieces + [(token, token + 1, 1) for token in range(whole, time)]


def _one_by_one(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence where something is NaN or infinite, as the reference has it."""
    outputs = []
    for token in zip(*(tensor.split(1, dim=1) for tensor in inputs), strict=True):
        one = ScanInputs(*token)
        infinite = ~state.isfinite()
        # The two parts of a decay have opposite signs, and ∞ times them would add up to NaN.
        decay = one.log_decay.to(state.dtype).exp()[:, 0, :, None, None]
        kept = torch.where(infinite, decay * state, 0)
        state = _advance(one, state.masked_fill(infinite, 0)) + kept
        outputs.append(_read(one, state))
    return torch.cat(outputs, dim=1), state


def _token(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token."""
    state = _advance(inputs, state)
    return _read(inputs, state), state


def _advance(inputs: ScanInputs, state: Tensor) -> Tensor:
    """The state after one token."""
    b, _, h, p = inputs.x.shape
    g, n = inputs.B.shape[2:]
    x = inputs.x.to(state.dtype).reshape(b, g, h // g * p, 1)
    B = inputs.B.to(state.dtype).reshape(b, g, 1, n)
    whole, rest = _split(inputs.log_decay.reshape(b, h, 1, 1), state.dtype)
    added = (rest * state).reshape(b, g, -1, n).addcmul_(x, B)
    return torch.addcmul(added.view(b, h, p, n), whole, state)


def _read(inputs: ScanInputs, state: Tensor) -> Tensor:
    """y of one token, `(b, 1, h, p)`, from the state after it."""
    b, _, h, p = inputs.x.shape
    g, n = inputs.B.shape[2:]
    C = inputs.C.to(state.dtype).reshape(b, g, n, 1)
    return (state.reshape(b, g, -1, n) @ C).view(b, 1, h, p)


def _scan(inputs: ScanInputs, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """One piece. Below, m counts chunks, i and j tokens of a chunk, r heads of a group."""
    b, time, h, p = inputs.x.shape
    g, n = inputs.B.shape[2:]
    m, r, dtype = time // chunk, h // g, state.dtype
    x = inputs.x.to(dtype).unflatten(1, (m, chunk))
    B = inputs.B.to(dtype).unflatten(1, (m, chunk)).transpose(2, 3)  # b m g j n
    C = inputs.C.to(dtype).unflatten(1, (m, chunk)).transpose(2, 3)  # b m g i n
    # From the chunk's start; a decay to nothing (−∞) becomes a finite one that is nothing too.
    total = inputs.log_decay.double().clamp(min=-1e4).unflatten(1, (m, chunk)).cumsum(2)

    # Within a chunk: attention-like products with the decay between j and i.
    scores = (C @ B.transpose(3, 4)).tril()  # b m g i j
    weights = scores[:, :, :, None] * decay_between(total, dtype).unflatten(2, (g, r))
    y = weights.flatten(2, 3) @ x.transpose(2, 3)  # b m h i p

    # Across chunks: what the state at a chunk's start gives to its tokens, then the next state.
    # `unbind`, because m selections would each cost a whole gradient of zeros.
    to_end = _exp((total[:, :, -1:] - total).to(dtype))  # b m j h
    x_to_end = (x * to_end[..., None]).unflatten(3, (g, r)).flatten(4)  # b m j g (r p)
    x_to_end = x_to_end.permute(0, 1, 3, 4, 2)  # b m g (r p) j
    # b m (r p) 1 of a group: decay of a whole chunk, a row of the state each. The state is taken by
    # rows too, so that nothing below is changed through a view, which autograd would copy.
    whole, rest = (
        part.expand(b, m, h, p).reshape(b, m, g, r * p, 1)
        for part in _split(total[:, :, -1, :, None], dtype)
    )
    rows = state.reshape(b * g, r * p, n)
    carried = []
    for x_m, B_m, C_m, whole_m, rest_m in zip(
        *(tensor.unbind(1) for tensor in (x_to_end, B, C, whole, rest)), strict=True
    ):
        carried.append(C_m @ rows.view(b, g, r * p, n).transpose(2, 3))  # b g i (r p)
        added = rest_m.reshape(b * g, r * p, 1) * rows
        added = added.baddbmm_(x_m.flatten(0, 1), B_m.flatten(0, 1))
        rows = torch.addcmul(added, whole_m.reshape(b * g, r * p, 1), rows)
    state = rows.view(b, h, p, n)

    since_start = _exp(total.to(dtype, copy=True))[..., None]  # b m i h 1
    start = torch.stack(carried, dim=1).transpose(2, 3).reshape(b, m, chunk, h, p)
    # Not addcmul, whose result would lie as `y` does and be copied once more.
    return (start * since_start).add_(y.transpose(2, 3)).reshape(b, time, h, p), state


def decay_between(total: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(Σ log_decay over (j, i]) as `(b, m, h, i, j)`: 0 below e^FLOOR, and 1 where j > i.

    Args:
        total: running sums of log_decay in a chunk, `(b, m, i, h)` float64.
        dtype: of the result.
    """
    high, low = _halves(total.transpose(2, 3), dtype)
    # The minus stands before the small tensor: the gradient of a difference is as large as itself.
    between = high[..., :, None] + (-high)[..., None, :]
    between.add_(low[..., :, None]).sub_(low[..., None, :])
    # Outside the graph, to keep nothing for the backward pass: below FLOOR the gradient is 0 to
    # rounding like the decay itself, and above 0 are only entries with j > i, which nobody reads.
    between.detach().clamp_(FLOOR, 0)
    between.exp_()
    # `exp` of −∞ would take twice the time. By `data`, because the zeros are also what the backward
    # pass has to find: the derivative of exp is its value.
    F.threshold(between.data, 1.001 * math.exp(FLOOR), 0.0, inplace=True)
    return between


def _split(log_decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """exp(log_decay) as two numbers of `dtype` that add up to it: 0 or 1, and the rest.

    The first times a state is exact, and the second keeps all its digits, so that a new state is
    rounded in one place, where what is kept and what is new are added.
    """
    log_decay = F.threshold(log_decay, FLOOR, -torch.inf)
    slow = log_decay > -0.69  # above one half: 1 is the nearer
    rest = torch.where(slow, log_decay.expm1(), log_decay.exp())
    return slow.to(dtype), rest.to(dtype)


def _halves(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two numbers of `dtype` that add up to `value`; the gradient flows through the first."""
    high = value.to(dtype)
    return high, (value - high).detach().to(dtype)


def _exp(log_decay: Tensor) -> Tensor:
    """exp in place, 0 below FLOOR; the argument must be a fresh tensor."""
    log_decay.detach().masked_fill_(log_decay < FLOOR, -torch.inf)
    return log_decay.exp_()
