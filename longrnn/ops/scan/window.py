"""The recurrence over the last w tokens only, from two plain scans.

    h_t = Σ_{i in (t − w, t]} a_{i+1} … a_t gain_i x_i B_iᵀ,   y_t = h_t C_t

A call is cut into blocks of w tokens from its own start. The window of row r of a block consists of

- the rows of its block up to r: a plain scan from the zero state, and
- the rows after r of the w tokens before the block: a scan backward in time without decays, whose
  inputs are weighted by their decay to the block's start, and whose output by the decay to row r.
  With decays per key, the first is a factor of B, and the second of C.

So no state is subtracted, and gradients and devices are those of the scan. Calls of few tokens are
computed as attention to their windows. What is remembered are the inputs of the last w tokens; the
state after them is their sum (`state_of`), which no later call needs. Without gradients, tokens of
short calls are written behind the inputs before them, into memory that no other state has
(`extended`), so that a token does not copy its window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.cpu.checks import tracked
from longrnn.ops.precision import own_precision
from longrnn.ops.rows import Rows
from longrnn.ops.scan.decays import key_decays
from longrnn.ops.scan.definition import LEAST_LOG_DECAY, scan
from longrnn.ops.scan.inputs import Decay, ScanInputs
from longrnn.ops.scan.recent import Recent, extended
from longrnn.ops.transforms import is_transformed
from longrnn.state import History

# A call of at most so many tokens is computed as attention; chosen on a CPU.
FEW_IN_WINDOW = 16
# Short blocks of about so many tokens are computed at once; chosen on a CPU, for its caches.
AT_ONCE = 1024

Scan = Callable[..., tuple[Tensor, Tensor | None]]


class TokenInputs(NamedTuple):
    """`Recent` by head: x `(b, l, h, p)`, gain `(b, l, h)`, decay, and B `(b, l, g, n)`."""

    x: Tensor
    gain: Tensor
    decay: Decay
    B: Tensor

    @classmethod
    def of(cls, inputs: ScanInputs) -> TokenInputs:
        """Those of the recurrence, without C; decays are expanded where keys have no rates."""
        decay = inputs.decay
        if decay.rate is None or decay.rate.ndim != 2 or decay.step.ndim == 4:
            decay = Decay(decay.log())
        elif decay.keep is not None and decay.keep.ndim == 3:
            # It is 1 at padding, which no window has.
            decay = decay._replace(keep=decay.keep.amin((0, 1)))
        return cls(inputs.x, inputs.gain, decay, inputs.B)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What is remembered of each token."""
        return self.x, self.gain, self.decay.step, self.B

    def with_tensors(self, tensors: Iterable[Tensor]) -> TokenInputs:
        """Those with other `tensors`."""
        x, gain, step, B = tensors
        return TokenInputs(x, gain, self.decay._replace(step=step), B)

    def each(self, change: Callable[[Tensor], Tensor]) -> TokenInputs:
        """The same change of all tensors."""
        return self.with_tensors(map(change, self.tensors))

    def slice(self, start: int, stop: int) -> TokenInputs:
        return self.each(lambda tensor: tensor[:, start:stop])

    def read_by(self, C: Tensor) -> ScanInputs:
        """The inputs of the recurrence."""
        return ScanInputs(self.x, self.gain, self.decay, self.B, C)

    def log_decay(self) -> Tensor:
        """`(b, l, h)` or, per key, `(b, l, h, n)`, finite."""
        return self.decay.log().clamp(min=LEAST_LOG_DECAY)

    def flat(self) -> Recent:
        """As they are remembered."""
        return Recent(*(History(tensor.flatten(2)) for tensor in self.tensors))


# (inputs of all tokens, C of the last of them, w) → y of these.
Attend = Callable[[TokenInputs, Tensor, int], Tensor]


def initial_recent(like: ScanInputs, rows: int) -> Recent:
    """What is remembered before the first token; `like` gives sizes, dtypes and device."""
    return (
        TokenInputs.of(like)
        .each(lambda tensor: tensor.new_zeros(rows, 0, *tensor.shape[2:]))
        .flat()
    )


def windowed(
    inputs: ScanInputs,
    recent: Recent,
    w: int,
    rows: Rows | None = None,
    *,
    scan: Scan = scan,
    attend: Attend | None = None,
) -> tuple[Tensor, Recent]:
    """Computes the windowed recurrence.

    Args:
        inputs: t >= 1.
        recent: of the tokens before.
        w: tokens of the window, with the present token.
        rows: where documents and padding begin.
        scan: see `longrnn.ops.scan.definition.scan`.
        attend: computes the windows of any number of tokens without gradients, if there is such a
            kernel for these inputs; see `attention`.

    Returns:
        y `(b, t, h, p)` in the dtype of the decays, and the inputs of the last w tokens.
    """
    given = TokenInputs.of(inputs)
    # Under autocast inputs may be narrower than what is remembered, whose dtype stays.
    pairs = zip(given.tensors, recent, strict=True)
    given = given.with_tensors(new.to(old.entries.dtype) for new, old in pairs)
    with own_precision(given.gain):
        return _windowed(given, inputs.C.to(given.B.dtype), recent, w, rows, scan, attend)


def _windowed(
    given: TokenInputs,
    C: Tensor,
    recent: Recent,
    w: int,
    rows: Rows | None,
    scan: Scan,
    kernel: Attend | None,
) -> tuple[Tensor, Recent]:
    time = C.shape[1]
    is_tracked = tracked([*given.read_by(C).tensors(), *(part.entries for part in recent)])
    attend = attention if is_tracked or kernel is None else kernel
    if time <= FEW_IN_WINDOW and rows is None and not is_tracked and not is_transformed():
        whole, after = extended(recent, time, w)
        for remembered, new in zip(whole, given.tensors, strict=True):
            # `data`, because a graph may hold the tokens before these.
            remembered.data[:, -time:] = new.flatten(2)
        both = after if time == 1 else Recent(*map(History, whole))
        return attend(_by_head(both, given), C, w), after
    before = _by_head(recent, given)
    # A state of a wider window remembers more.
    before = before.slice(max(0, before.x.shape[1] - w), before.x.shape[1])
    known = before.x.shape[1]
    last = _last(before, given, w, rows)
    after = last.flat()
    if time <= FEW_IN_WINDOW or attend is not attention:
        return attend(_joined(before, given), C, w), after
    if known + time <= w:  # nothing leaves the window
        start = _sum(_decayed_to_end(before))
        return scan(given.read_by(C), start, final=False)[0], after
    if known < w:
        before = before.each(partial(_front, count=w - known))
    outputs, start = [], 0
    while start < time:  # some whole blocks at once, or the last tokens
        count = max(1, min(AT_ONCE // w, (time - start) // w))
        new = given.slice(start, start + count * w)
        old = before if count == 1 else _joined(before, new.slice(0, (count - 1) * w))
        cut = partial(_cut, count=count)
        queries = cut(C[:, start : start + count * w])
        y = _block(old.each(cut), new.each(cut), queries, scan)
        outputs.append(y.unflatten(0, (-1, count)).flatten(1, 2))
        before, start = new.slice((count - 1) * w, count * w), start + count * w
    return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0], after


def _last(before: TokenInputs, given: TokenInputs, w: int, rows: Rows | None) -> TokenInputs:
    """The inputs of the last w tokens, in memory of their own."""
    if rows is None:
        known, time = before.x.shape[1], given.x.shape[1]
        before = before.slice(max(0, known + min(time, w) - w), known)
        return _joined(before, given.slice(max(0, time - w), time))
    both = _joined(before, given)
    return both.each(lambda tensor: rows.last(tensor, min(w, tensor.shape[1])))


def _joined(before: TokenInputs, given: TokenInputs) -> TokenInputs:
    pairs = zip(before.tensors, given.tensors, strict=True)
    return given.with_tensors(torch.cat(pair, dim=1) for pair in pairs)


def _cut(tokens: Tensor, count: int) -> Tensor:
    """`count` blocks of tokens as rows of a batch: `(b count, w, …)` from `(b, count w, …)`."""
    return tokens.unflatten(1, (count, -1)).flatten(0, 1)


def state_of(recent: Recent, like: ScanInputs) -> Tensor:
    """The state after the last token of `recent`, `(b, h, p, n)`; `like` gives the sizes."""
    with own_precision(like.gain):
        return _sum(_decayed_to_end(_by_head(recent, TokenInputs.of(like))))


def _by_head(recent: Recent, like: TokenInputs) -> TokenInputs:
    pairs = zip(recent, like.tensors, strict=True)
    return like.with_tensors(
        history.entries.unflatten(-1, tensor.shape[2:]) for history, tensor in pairs
    )


def _front(tokens: Tensor, count: int) -> Tensor:
    """Tokens `(b, l, …)` with `count` zeros in front."""
    return F.pad(tokens, (0, 0) * (tokens.ndim - 2) + (count, 0))


def _decayed_to_end(inputs: TokenInputs) -> TokenInputs:
    """The inputs, whose gain or, per key, B is multiplied by the decays to the last token."""
    total = inputs.log_decay().double().flip(1).cumsum(1).flip(1)
    decay = torch.cat([total[:, 1:], torch.zeros_like(total[:, :1])], dim=1).exp()
    if inputs.decay.is_per_key:
        return inputs._replace(B=_per_head(inputs.B, inputs.gain) * decay.to(inputs.B))
    return inputs._replace(gain=(inputs.gain.double() * decay).to(inputs.gain))


def _per_head(shared: Tensor, gain: Tensor) -> Tensor:
    """B or C of every head, `(b, l, h, n)`."""
    return shared.repeat_interleave(gain.shape[2] // shared.shape[2], 2)


def _sum(decayed: TokenInputs) -> Tensor:
    """The state after the last token, `(b, h, p, n)`, from `_decayed_to_end`."""
    weight, groups = decayed.gain, decayed.B.shape[2]
    u = (decayed.x.to(weight.dtype) * weight[..., None]).unflatten(2, (groups, -1))
    return torch.einsum("blgrp,blgn->bgrpn", u, decayed.B.to(weight.dtype)).flatten(1, 2)


def attention(both: TokenInputs, C: Tensor, w: int) -> Tensor:
    """y of the last tokens of `both`, each of which attends to the w tokens up to itself."""
    dtype, time, groups = both.gain.dtype, C.shape[1], C.shape[2]
    place = torch.arange(both.x.shape[1], device=C.device)
    distance = place[-time:, None] - place
    is_outside = (distance < 0) | (distance >= w)
    gain = both.gain.transpose(1, 2)[:, :, None]
    if both.decay.is_per_key:
        weights = _key_scores(both, C).masked_fill(is_outside, 0) * gain
    else:
        total = both.log_decay().double().cumsum(1).transpose(1, 2)  # b h j
        between = total[:, :, -time:, None] - total[:, :, None]  # b h i j
        weights = (between.masked_fill(is_outside, -torch.inf).exp() * gain).to(dtype)
        scores = C.to(dtype).transpose(1, 2) @ both.B.to(dtype).permute(0, 2, 3, 1)  # b g i j
        weights = (weights.unflatten(1, (groups, -1)) * scores[:, :, None]).flatten(1, 2)
    # Only contiguous weights are multiplied by all heads at once.
    return (weights.contiguous() @ both.x.to(dtype).transpose(1, 2)).transpose(1, 2)


def _key_scores(both: TokenInputs, C: Tensor) -> Tensor:
    """What the last tokens i read of all tokens j with decays per key, `(b, h, i, j)`."""
    time, dtype = both.x.shape[1] - C.shape[1], both.gain.dtype
    old, new = both.slice(0, time), both.slice(time, both.x.shape[1])
    queries, keys, log_decay = (
        per_key.to(dtype).transpose(1, 2)
        for per_key in (_per_head(C, new.gain), _per_head(new.B, new.gain), new.log_decay())
    )
    among_new = key_decays(queries[..., None, :], keys, log_decay)
    written = _decayed_to_end(old).B.to(dtype).transpose(1, 2)
    read = (queries * among_new.since_start.exp()) @ written.mT
    return torch.cat([read, among_new.scores[..., 0, :]], dim=-1)


def _block(old: TokenInputs, new: TokenInputs, C: Tensor, scan: Scan) -> Tensor:
    """y of the m <= w tokens `new`, `(b, m, h, p)`, given the w tokens before them."""
    m, w = new.x.shape[1], old.x.shape[1]
    y, _ = scan(new.read_by(C), final=False)
    old = _decayed_to_end(old)
    since = new.log_decay().double().cumsum(1).exp().to(old.gain)
    if new.decay.is_per_key:
        C, since = _per_head(C, new.gain) * since, torch.ones_like(new.gain)
    since = since[..., None]
    # The last row, m − 1, reads the old rows from m on. Going backward, row r adds old row r + 1.
    last = _sum(old.slice(m, w)) if m < w else None
    if m > 1:
        x, gain, _, B = old.slice(1, m)
        inputs = ScanInputs(x, gain, Decay(torch.zeros_like(gain)), B, C[:, : m - 1])
        read, _ = scan(inputs, last, final=False, backward=True)
        y[:, : m - 1].addcmul_(since[:, : m - 1], read)
    if last is not None:
        by_group = last.unflatten(1, (C.shape[2], -1))
        read = torch.einsum("bgrpn,btgn->btgrp", by_group, C[:, m - 1 :].to(last)).flatten(2, 3)
        y[:, m - 1 :].addcmul_(since[:, m - 1 :], read)
    return y
