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

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.cpu.checks import tracked
from longrnn.ops.precision import own_precision
from longrnn.ops.rows import Rows
from longrnn.ops.scan.decays import LEAST_LOG_DECAY, chunk_decays, decay_exp
from longrnn.ops.scan.definition import scan
from longrnn.ops.scan.inputs import Decay, ScanInputs
from longrnn.ops.scan.recent import Recent, extended
from longrnn.ops.transforms import is_transformed
from longrnn.state import History

# A call of at most so many tokens is computed as attention; chosen on a CPU.
FEW_IN_WINDOW = 16
# Short blocks of about so many tokens are computed at once; chosen on a CPU, for its caches.
AT_ONCE = 1024

Scan = Callable[..., tuple[Tensor, Tensor | None]]


# (inputs of all tokens, C of the last of them, w) → y of these.
Attend = Callable[[ScanInputs, Tensor, int], Tensor]


def _remembered(inputs: ScanInputs) -> ScanInputs:
    """The inputs with B in the place of C; decays are expanded where keys have no rates."""
    decay = inputs.decay
    if decay.rate is None or decay.rate.ndim != 2 or decay.step.ndim == 4:
        decay = Decay(decay.log())
    elif decay.keep is not None and decay.keep.ndim == 3:
        # It is 1 at padding, which no window has.
        decay = decay._replace(keep=decay.keep.amin((0, 1)))
    return inputs._replace(decay=decay, C=inputs.B)


def _parts(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is remembered of each token."""
    return inputs.x, inputs.gain, inputs.decay.step, inputs.B


def _with_parts(inputs: ScanInputs, parts: Iterable[Tensor]) -> ScanInputs:
    """The inputs with other `_parts`."""
    x, gain, step, B = parts
    return ScanInputs(x, gain, inputs.decay._replace(step=step), B, B)


def _flat(inputs: ScanInputs) -> Recent:
    """The inputs as they are remembered."""
    return Recent(*(History(part.flatten(2)) for part in _parts(inputs)))


def initial_recent(like: ScanInputs, rows: int) -> Recent:
    """What is remembered before the first token; `like` gives sizes, dtypes and device."""
    none = _remembered(like).each(lambda part: part.new_zeros(rows, 0, *part.shape[2:]))
    return _flat(none)


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
    given = _remembered(inputs)
    # Under autocast inputs may be narrower than what is remembered, whose dtype stays.
    pairs = zip(_parts(given), recent, strict=True)
    given = _with_parts(given, (new.to(old.entries.dtype) for new, old in pairs))
    with own_precision(given.gain):
        return _windowed(given, inputs.C.to(given.B.dtype), recent, w, rows, scan, attend)


def _windowed(
    given: ScanInputs,
    C: Tensor,
    recent: Recent,
    w: int,
    rows: Rows | None,
    scan: Scan,
    kernel: Attend | None,
) -> tuple[Tensor, Recent]:
    time = C.shape[1]
    is_tracked = tracked([*given._replace(C=C).tensors(), *(part.entries for part in recent)])
    attend = attention if is_tracked or kernel is None else kernel
    if time <= FEW_IN_WINDOW and rows is None and not is_tracked and not is_transformed():
        whole, after = extended(recent, time, w)
        for remembered, new in zip(whole, _parts(given), strict=True):
            # `data`, because a graph may hold the tokens before these.
            remembered.data[:, -time:] = new.flatten(2)
        both = after if time == 1 else Recent(*map(History, whole))
        return attend(_by_head(both, given), C, w), after
    before = _by_head(recent, given)
    # A state of a wider window remembers more.
    before = before.slice(max(0, before.x.shape[1] - w), before.x.shape[1])
    known = before.x.shape[1]
    last = _last(before, given, w, rows)
    after = _flat(last)
    if time <= FEW_IN_WINDOW or attend is not attention:
        return attend(_joined(before, given), C, w), after
    if known + time <= w:  # nothing leaves the window
        start = _sum(_decayed_to_end(before))
        return scan(given._replace(C=C), start, final=False)[0], after
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


def _last(before: ScanInputs, given: ScanInputs, w: int, rows: Rows | None) -> ScanInputs:
    """The inputs of the last w tokens, in memory of their own."""
    if rows is None:
        known, time = before.x.shape[1], given.x.shape[1]
        before = before.slice(max(0, known + min(time, w) - w), known)
        return _joined(before, given.slice(max(0, time - w), time))
    both = _joined(before, given)
    return both.each(lambda tensor: rows.last(tensor, min(w, tensor.shape[1])))


def _joined(before: ScanInputs, given: ScanInputs) -> ScanInputs:
    pairs = zip(_parts(before), _parts(given), strict=True)
    return _with_parts(given, (torch.cat(pair, dim=1) for pair in pairs))


def _cut(tokens: Tensor, count: int) -> Tensor:
    """`count` blocks of tokens as rows of a batch: `(b count, w, …)` from `(b, count w, …)`."""
    return tokens.unflatten(1, (count, -1)).flatten(0, 1)


def state_of(recent: Recent, like: ScanInputs) -> Tensor:
    """The state after the last token of `recent`, `(b, h, p, n)`; `like` gives the sizes."""
    with own_precision(like.gain):
        return _sum(_decayed_to_end(_by_head(recent, _remembered(like))))


def _by_head(recent: Recent, like: ScanInputs) -> ScanInputs:
    pairs = zip(recent, _parts(like), strict=True)
    return _with_parts(like, (old.entries.unflatten(-1, part.shape[2:]) for old, part in pairs))


def _front(tokens: Tensor, count: int) -> Tensor:
    """Tokens `(b, l, …)` with `count` zeros in front."""
    return F.pad(tokens, (0, 0) * (tokens.ndim - 2) + (count, 0))


def _decayed_to_end(inputs: ScanInputs) -> ScanInputs:
    """The inputs, whose gain or, per key, B is multiplied by the decays to the last token."""
    total = _log_decay(inputs).double().flip(1).cumsum(1).flip(1)
    decay = torch.cat([total[:, 1:], torch.zeros_like(total[:, :1])], dim=1).exp()
    if inputs.has_key_decays:
        return inputs._replace(B=inputs.per_head(inputs.B) * decay.to(inputs.B))
    return inputs._replace(gain=(inputs.gain.double() * decay[..., 0]).to(inputs.gain))


def _log_decay(inputs: ScanInputs) -> Tensor:
    """`ScanInputs.log_decay`, finite."""
    return inputs.log_decay().clamp(min=LEAST_LOG_DECAY)


def _sum(decayed: ScanInputs) -> Tensor:
    """The state after the last token, `(b, h, p, n)`, from `_decayed_to_end`."""
    weight, groups = decayed.gain, decayed.B.shape[2]
    u = (decayed.x.to(weight.dtype) * weight[..., None]).unflatten(2, (groups, -1))
    return torch.einsum("blgrp,blgn->bgrpn", u, decayed.B.to(weight.dtype)).flatten(1, 2)


def attention(both: ScanInputs, C: Tensor, w: int) -> Tensor:
    """y of the last tokens of `both`, each of which attends to the w tokens up to itself."""
    dtype, time, known = both.gain.dtype, C.shape[1], both.x.shape[1] - C.shape[1]
    old, new = _decayed_to_end(both.slice(0, known)), both.slice(known, known + time)
    queries, keys, old_keys, log_decay = (
        one.transpose(1, 2) for one in (C.to(dtype), new.B.to(dtype), old.B, _log_decay(new))
    )
    among_new = chunk_decays([queries], keys, log_decay)
    since = decay_exp(among_new.since_start, dtype)
    heads = new.x.shape[2] // queries.shape[1]
    if both.has_key_decays:
        read = (queries.repeat_interleave(heads, 1) * since) @ old_keys.mT.to(dtype)
    else:
        read = (queries @ old_keys.mT.to(dtype)).repeat_interleave(heads, 1) * since
    place = torch.arange(known + time, device=C.device)
    distance = place[known:, None] - place
    weights = torch.cat([read, *among_new.scores], dim=-1)
    weights = weights.masked_fill((distance < 0) | (distance >= w), 0)
    gain = torch.cat([old.gain, new.gain], dim=1).transpose(1, 2)[:, :, None]
    # Only contiguous weights are multiplied by all heads at once.
    return ((weights * gain).contiguous() @ both.x.to(dtype).transpose(1, 2)).transpose(1, 2)


def _block(old: ScanInputs, new: ScanInputs, C: Tensor, scan: Scan) -> Tensor:
    """y of the m <= w tokens `new`, `(b, m, h, p)`, given the w tokens before them."""
    m, w = new.x.shape[1], old.x.shape[1]
    y, _ = scan(new._replace(C=C), final=False)
    old = _decayed_to_end(old)
    since = _log_decay(new).double().cumsum(1).exp().to(old.gain)
    if new.has_key_decays:
        C, since = new.per_head(C) * since, torch.ones_like(new.gain[..., None])
    # The last row, m − 1, reads the old rows from m on. Going backward, row r adds old row r + 1.
    last = _sum(old.slice(m, w)) if m < w else None
    if m > 1:
        x, gain, _, B, _ = old.slice(1, m)
        inputs = ScanInputs(x, gain, Decay(torch.zeros_like(gain)), B, C[:, : m - 1])
        read, _ = scan(inputs.each(lambda tensor: tensor.flip(1)), last, final=False)
        y[:, : m - 1].addcmul_(since[:, : m - 1], read.flip(1))
    if last is not None:
        by_group = last.unflatten(1, (C.shape[2], -1))
        read = torch.einsum("bgrpn,btgn->btgrp", by_group, C[:, m - 1 :].to(last)).flatten(2, 3)
        y[:, m - 1 :].addcmul_(since[:, m - 1 :], read)
    return y
