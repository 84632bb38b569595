"""The recurrence over the last w tokens only, from two plain scans.

    h_t = Σ_{i in (t − w, t]} a_{i+1} … a_t gain_i x_i B_iᵀ,   y_t = h_t C_t,   a = exp(log_decay)

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

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.cpu.checks import tracked
from longrnn.ops.precision import own_precision
from longrnn.ops.recent import Recent, extended
from longrnn.ops.rows import Rows
from longrnn.ops.scan.decays import key_decays
from longrnn.ops.scan.definition import NEVER, ScanInputs
from longrnn.ops.transforms import is_transformed
from longrnn.state import History

# A call of at most so many tokens is computed as attention; chosen on a CPU.
FEW_IN_WINDOW = 16
# Short blocks of about so many tokens are computed at once; chosen on a CPU, for its caches.
AT_ONCE = 1024

Scan = Callable[..., tuple[Tensor, Tensor | None]]


class _Inputs(NamedTuple):
    """`Recent` by head: x `(b, l, h, p)`, gain `(b, l, h)`, log_decay `(b, l, h)` or, per key,
    `(b, l, h, n)`, B `(b, l, g, n)`."""

    x: Tensor
    gain: Tensor
    log_decay: Tensor
    B: Tensor

    @classmethod
    def of(cls, inputs: ScanInputs) -> _Inputs:
        """Those of the recurrence, without C."""
        return cls(inputs.x, inputs.gain, inputs.log_decay, inputs.B)

    def each(self, change: Callable[[Tensor], Tensor]) -> _Inputs:
        """The same change of all tensors."""
        return _Inputs(change(self.x), change(self.gain), change(self.log_decay), change(self.B))

    def slice(self, start: int, stop: int) -> _Inputs:
        return self.each(lambda tensor: tensor[:, start:stop])

    def read_by(self, C: Tensor) -> ScanInputs:
        """The inputs of the recurrence."""
        return ScanInputs(self.x, self.gain, self.log_decay, self.B, C)

    def flat(self) -> Recent:
        """As they are remembered."""
        x, gain, log_decay, B = (History(tensor.flatten(2)) for tensor in self)
        return Recent(x, gain, log_decay, B)


def no_tokens(like: ScanInputs, rows: int) -> Recent:
    """What is remembered before the first token; `like` gives sizes, dtypes and device."""
    return _Inputs.of(like).each(lambda tensor: tensor.new_zeros(rows, 0, *tensor.shape[2:])).flat()


def windowed(
    inputs: ScanInputs, recent: Recent, w: int, scan: Scan, rows: Rows | None = None
) -> tuple[Tensor, Recent]:
    """Computes the windowed recurrence.

    Args:
        inputs: t >= 1.
        recent: of the tokens before.
        w: tokens of the window, with the present token.
        scan: see `longrnn.ops.scan.definition.scan`.
        rows: where documents and padding begin; the log decays are −∞ at starts.

    Returns:
        y `(b, t, h, p)` in the dtype of the decays, and the inputs of the last w tokens.
    """
    # Under autocast inputs may be narrower than what is remembered, whose dtype stays.
    x, gain, log_decay, B = (
        new.to(old.entries.dtype) for new, old in zip(_Inputs.of(inputs), recent, strict=True)
    )
    inputs = ScanInputs(x, gain, log_decay, B, inputs.C.to(B.dtype))
    with own_precision(inputs.gain):
        return _windowed(inputs, recent, w, scan, rows)


def _windowed(
    inputs: ScanInputs, recent: Recent, w: int, scan: Scan, rows: Rows | None
) -> tuple[Tensor, Recent]:
    time, given = inputs.x.shape[1], _Inputs.of(inputs)
    is_tracked = tracked([*given, *(history.entries for history in recent)])
    if time <= FEW_IN_WINDOW and rows is None and not is_tracked and not is_transformed():
        whole, after = extended(recent, time, w)
        for remembered, new in zip(whole, given, strict=True):
            # `data`, because a graph may hold the tokens before these.
            remembered.data[:, -time:] = new.flatten(2)
        both = after if time == 1 else Recent(*map(History, whole))
        return _attention(_by_head(both, given), inputs.C, w), after
    before = _by_head(recent, given)
    # A state of a wider window remembers more.
    before = before.slice(max(0, before.x.shape[1] - w), before.x.shape[1])
    known = before.x.shape[1]
    last = _last(before, given, w, rows)
    after = last.flat()
    if time <= FEW_IN_WINDOW:
        return _attention(_joined(before, given), inputs.C, w), after
    before = before._replace(log_decay=before.log_decay.clamp(min=NEVER))
    given = given._replace(log_decay=given.log_decay.clamp(min=NEVER))
    if known + time <= w:  # nothing leaves the window
        start = _sum(_decayed_to_end(before))
        return scan(given.read_by(inputs.C), start, final=False)[0], after
    if known < w:
        before = before.each(partial(_front, count=w - known))
    outputs, start = [], 0
    while start < time:  # some whole blocks at once, or the last tokens
        count = max(1, min(AT_ONCE // w, (time - start) // w))
        new = given.slice(start, start + count * w)
        old = before if count == 1 else _joined(before, new.slice(0, (count - 1) * w))
        cut = partial(_cut, count=count)
        C = cut(inputs.C[:, start : start + count * w])
        y = _block(old.each(cut), new.each(cut).read_by(C), scan)
        outputs.append(y.unflatten(0, (-1, count)).flatten(1, 2))
        before, start = new.slice((count - 1) * w, count * w), start + count * w
    return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0], after


def _last(before: _Inputs, given: _Inputs, w: int, rows: Rows | None) -> _Inputs:
    """The inputs of the last w tokens, in memory of their own."""
    if rows is None:
        known, time = before.x.shape[1], given.x.shape[1]
        before = before.slice(max(0, known + min(time, w) - w), known)
        return _joined(before, given.slice(max(0, time - w), time))
    both = _joined(before, given)
    return both.each(lambda tensor: rows.last(tensor, min(w, tensor.shape[1])))


def _joined(before: _Inputs, given: _Inputs) -> _Inputs:
    x, gain, log_decay, B = (
        torch.cat([old, new], dim=1) for old, new in zip(before, given, strict=True)
    )
    return _Inputs(x, gain, log_decay, B)


def _cut(tokens: Tensor, count: int) -> Tensor:
    """`count` blocks of tokens as rows of a batch: `(b count, w, …)` from `(b, count w, …)`."""
    return tokens.unflatten(1, (count, -1)).flatten(0, 1)


def state_of(recent: Recent, like: ScanInputs) -> Tensor:
    """The state after the last token of `recent`, `(b, h, p, n)`; `like` gives the sizes."""
    with own_precision(like.gain):
        return _sum(_decayed_to_end(_by_head(recent, _Inputs.of(like))))


def _by_head(recent: Recent, like: _Inputs) -> _Inputs:
    x, gain, log_decay, B = (
        history.entries.unflatten(-1, tensor.shape[2:])
        for history, tensor in zip(recent, like, strict=True)
    )
    return _Inputs(x, gain, log_decay, B)


def _front(tokens: Tensor, count: int) -> Tensor:
    """Tokens `(b, l, …)` with `count` zeros in front."""
    return F.pad(tokens, (0, 0) * (tokens.ndim - 2) + (count, 0))


def _decayed_to_end(inputs: _Inputs) -> _Inputs:
    """The inputs, whose gain or, per key, B is multiplied by the decays to the last token."""
    total = inputs.log_decay.clamp(min=NEVER).double().flip(1).cumsum(1).flip(1)
    decay = torch.cat([total[:, 1:], torch.zeros_like(total[:, :1])], dim=1).exp()
    if inputs.log_decay.ndim == 4:
        return inputs._replace(B=_per_head(inputs.B, inputs.gain) * decay.to(inputs.B))
    return inputs._replace(gain=(inputs.gain.double() * decay).to(inputs.gain))


def _per_head(shared: Tensor, gain: Tensor) -> Tensor:
    """B or C of every head, `(b, l, h, n)`."""
    return shared.repeat_interleave(gain.shape[2] // shared.shape[2], 2)


def _sum(decayed: _Inputs) -> Tensor:
    """The state after the last token, `(b, h, p, n)`, from `_decayed_to_end`."""
    weight, groups = decayed.gain, decayed.B.shape[2]
    u = (decayed.x.to(weight.dtype) * weight[..., None]).unflatten(2, (groups, -1))
    return torch.einsum("blgrp,blgn->bgrpn", u, decayed.B.to(weight.dtype)).flatten(1, 2)


def _attention(both: _Inputs, C: Tensor, w: int) -> Tensor:
    """y of the last tokens of `both`, each of which attends to the w tokens up to itself."""
    dtype, time, groups = both.gain.dtype, C.shape[1], C.shape[2]
    place = torch.arange(both.x.shape[1], device=C.device)
    distance = place[-time:, None] - place
    is_outside = (distance < 0) | (distance >= w)
    gain = both.gain.transpose(1, 2)[:, :, None]
    if both.log_decay.ndim == 4:
        weights = _key_scores(both, C).masked_fill(is_outside, 0) * gain
    else:
        total = both.log_decay.clamp(min=NEVER).double().cumsum(1).transpose(1, 2)  # b h j
        between = total[:, :, -time:, None] - total[:, :, None]  # b h i j
        weights = (between.masked_fill(is_outside, -torch.inf).exp() * gain).to(dtype)
        scores = C.to(dtype).transpose(1, 2) @ both.B.to(dtype).permute(0, 2, 3, 1)  # b g i j
        weights = (weights.unflatten(1, (groups, -1)) * scores[:, :, None]).flatten(1, 2)
    # Only contiguous weights are multiplied by all heads at once.
    return (weights.contiguous() @ both.x.to(dtype).transpose(1, 2)).transpose(1, 2)


def _key_scores(both: _Inputs, C: Tensor) -> Tensor:
    """What the last tokens i read of all tokens j with decays per key, `(b, h, i, j)`."""
    time, dtype = both.x.shape[1] - C.shape[1], both.gain.dtype
    old, new = both.slice(0, time), both.slice(time, both.x.shape[1])
    queries, keys, log_decay = (
        per_key.to(dtype).transpose(1, 2)
        for per_key in (_per_head(C, new.gain), _per_head(new.B, new.gain), new.log_decay)
    )
    among_new = key_decays(queries[..., None, :], keys, log_decay)
    written = _decayed_to_end(old).B.to(dtype).transpose(1, 2)
    read = (queries * among_new.since_start.exp()) @ written.mT
    return torch.cat([read, among_new.scores[..., 0, :]], dim=-1)


def _block(old: _Inputs, new: ScanInputs, scan: Scan) -> Tensor:
    """y of the m <= w tokens `new`, `(b, m, h, p)`, given the w tokens before them."""
    m, w, C = new.x.shape[1], old.x.shape[1], new.C
    y, _ = scan(new, final=False)
    old = _decayed_to_end(old)
    since = new.log_decay.double().cumsum(1).exp().to(old.gain)
    if new.has_key_decays:
        C, since = _per_head(C, new.gain) * since, torch.ones_like(new.gain)
    since = since[..., None]
    # The last row, m − 1, reads the old rows from m on. Going backward, row r adds old row r + 1.
    last = _sum(old.slice(m, w)) if m < w else None
    if m > 1:
        x, gain, log_decay, B = old.slice(1, m)
        inputs = ScanInputs(x, gain, torch.zeros_like(log_decay), B, C[:, : m - 1])
        read, _ = scan(inputs, last, final=False, backward=True)
        y[:, : m - 1].addcmul_(since[:, : m - 1], read)
    if last is not None:
        by_group = last.unflatten(1, (C.shape[2], -1))
        read = torch.einsum("bgrpn,btgn->btgrp", by_group, C[:, m - 1 :].to(last)).flatten(2, 3)
        y[:, m - 1 :].addcmul_(since[:, m - 1 :], read)
    return y
