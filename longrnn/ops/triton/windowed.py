# pyright: reportArgumentType=false, reportCallIssue=false
"""The recurrence over the last w inputs as calls of the kernels in `window` and `scan`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.triton import on_device
from longrnn.ops.triton.chunk import LEAST
from longrnn.ops.triton.device import tile
from longrnn.ops.triton.recurrence import (
    PASSING_BLOCK,
    Operands,
    Plan,
    operands,
    plan,
    sizes_of,
    start_walk,
    strides_of,
)
from longrnn.ops.triton.scan import scan
from longrnn.ops.triton.window import edges, sliding


class Window(NamedTuple):
    """How a window is cut into segments, and how far the call completes them.

    Attributes:
        span: tokens per segment.
        rest: window modulo span.
        between: how many whole segments lie inside the window of every token.
        slot: number of the call's first segment in its block of `between` segments.
        complete: how many segments the call completes.
    """

    span: int
    rest: int
    between: int
    slot: int
    complete: int


class Stacks(NamedTuple):
    """Sums of the states that segments add.

    Attributes:
        front: slots from `base` on, `(slots, b, h, p, n)`, changed in place.
        base: number of the first slot in `front`.
        back: `(b, h, p, n)`, changed in place.
        back_decay: `(b, h)` float64, changed in place.
        totals: log decays of the `between + 2` segments before the call, `(…, b, h)` float64.
    """

    front: Tensor
    base: int
    back: Tensor
    back_decay: Tensor
    totals: Tensor


class Windowed(NamedTuple):
    """What `forward` returns.

    Attributes:
        y: `(b, t, h, p)`.
        state: of the last token's window, `(b, h, p, n)`.
        ends: `Stacks.totals`, then the log decays of the segments that the call completes.
        is_finite: whether all of y is, a bool on the device.
    """

    y: Tensor
    state: Tensor
    ends: Tensor
    is_finite: Tensor


def forward(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor],
    C: Tensor,
    window: Window,
    stacks: Stacks,
    chunk: int,
    *,
    rounded: bool,
) -> Windowed:
    """The windowed recurrence from the start of a segment on.

    Args:
        tokens: x `(b, s + t, h, p)`, gain and log_decay `(b, s + t, h)` and B `(b, s + t, g, n)`:
            the segments before the call of which its tokens read inputs, oldest first, then the t
            tokens of the call.
        C: `(b, t, g, n)`.
        window: see `Window`.
        stacks: see `Stacks`.
        chunk: tokens per chunk, as in `longrnn.ops.triton.recurrence.plan`.
        rounded: whether operands that are computed may be rounded to bfloat16.
    """
    known = operands(*tokens, C, stacks.back)
    new = _from(known, tokens[0].shape[1] - C.shape[1])._replace(C=known.C)
    time = C.shape[1]
    how = plan(new, min(chunk, tile(window.span)), window.span, rounded=rounded)
    how = how._replace(segment=window.span, segments=triton.cdiv(time, window.span))
    y, final = new.state.new_empty(new.x.shape), torch.empty_like(new.state)
    sizes = sizes_of(new)
    grid = how.segments * new.heads, triton.cdiv(sizes["P"], sizes["BP"])
    trouble = final.new_empty((new.heads, how.segments * grid[1]), dtype=torch.int32)
    common = sizes | {"L": how.chunk, "MODE": how.mode, "num_warps": 8}
    with on_device(y):
        first, ends = _between(new, how, window, stacks)
        to_row = _decay_to_rows(new.log_decay, ends, window, how).to(y.dtype)
        edges[grid](
            *known[:5], to_row, y, time, known.x.shape[1], window.span, window.rest, new.heads,
            *strides_of(known.x, known.B, known.C), **common,
        )  # fmt: skip
        scan[grid](
            *new[:5], new.state if first is None else first, final, y, trouble,
            time, window.span, new.heads, *strides_of(new.x, new.B, new.C),
            **common, FINAL=True, FROM_ZERO=first is None, ADD=True,
        )  # fmt: skip
        older = _edge_state(known, how, window)
    if older is not None:
        final = torch.addcmul(final, older, to_row[:, -1, :, None, None])
    return Windowed(y, final, ends, (trouble == 0).all())


def _from(given: Operands, start: int, stop: int | None = None) -> Operands:
    """Tokens `start` up to `stop` of x, gain, log_decay and B."""
    x, gain, log_decay, B = (tensor[:, start:stop] for tensor in given[:4])
    return given._replace(x=x, gain=gain.contiguous(), log_decay=log_decay.contiguous(), B=B)


def _between(
    new: Operands, how: Plan, window: Window, stacks: Stacks
) -> tuple[Tensor | None, Tensor]:
    """The sums over the segments between, None for zeros; and `Windowed.ends`."""
    b, h, p, n = new.state.shape
    own = new.state.new_empty((how.segments, b, h, p, n))
    total = own.new_empty((how.segments, b, h), dtype=torch.float64)
    ends = stacks.totals
    if window.complete:
        ahead = (new.x, new.gain, new.log_decay, new.B)
        start_walk(ahead, None, None, own, total, new, how, reverse=False)
        ends = torch.cat([ends, total[: window.complete]])
    if window.between == 0:
        return None, ends
    first = torch.empty_like(own)
    sliding[new.heads, triton.cdiv(p * n, PASSING_BLOCK)](
        own, ends, stacks.front, stacks.back, stacks.back_decay, first,
        how.segments, window.complete, window.slot, stacks.base, window.between, new.heads,
        M=p * n, BLOCK=PASSING_BLOCK,
    )  # fmt: skip
    return first, ends


def _decay_to_rows(log_decay: Tensor, ends: Tensor, window: Window, how: Plan) -> Tensor:
    """The decay from the end of the pair of each token's segment to the token, `(b, t, h)`."""
    time, span = log_decay.shape[1], window.span
    wide = log_decay.double().clamp(min=LEAST.value)
    padded = F.pad(wide, (0, 0, 0, how.segments * span - time))
    total = padded.unflatten(1, (how.segments, span)).cumsum(2)  # b m s h
    if window.between:
        between = ends.unfold(0, window.between, 1)[2 : 2 + how.segments].sum(-1)  # m b h
        total = total + between.transpose(0, 1)[:, :, None]
    return total.flatten(1, 2)[:, :time].exp()


def _edge_state(known: Operands, how: Plan, window: Window) -> Tensor | None:
    """What the pair of the last segment adds to the last token's state, at the end of the pair."""
    last = how.segments - 1
    row = known.C.shape[1] - 1 - last * window.span
    begin = last * window.span
    start, stop = begin + window.span - window.rest + 1 + row, begin + 2 * window.span
    if start >= stop:
        return None
    part = _from(known, start, stop)
    state = torch.empty_like(known.state)
    total = state.new_empty(state.shape[:2], dtype=torch.float64)
    one = how._replace(segment=stop - start, segments=1)
    start_walk(
        (part.x, part.gain, part.log_decay, part.B), None, None, state, total, part, one,
        reverse=False,
    )  # fmt: skip
    return state
