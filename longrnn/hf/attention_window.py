"""Attention to the first tokens of a document and the last ones (StreamingLLM, arXiv 2309.17453).

With a window of N tokens and S sinks, a token at position t reads the keys at positions below S and
above t − N. Distances are those in the text as long as t is below the reach, S + N − 1. From there
on the distance to the sink at position i is S + N − 1 − i, as if the text between sinks and window
were cut out. So no distance exceeds the reach, however long the text is.

Notable choices:
- Keys are kept without their rotary rotation, and rotated in each call by their distance from its
  first token. Angles stay small, and so exact, in texts of any length.
- A query has one rotation for the window. Far sinks need another one, which is the same for every
  token: the reach. Their products with the queries are computed first, and enter the model's own
  attention as further dimensions of the queries, with unit vectors as keys. Soft caps, learned
  sinks and whatever else a model does to its scores is therefore applied to them too.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.rows import MORE_THAN_ANY_DOCUMENT, Rows, positions_of

# Fewer tokens are not read apart from others: products of few rows are slow.
LEAST_BLOCK = 128


class AttentionWindow(NamedTuple):
    """What attention reads: the last `size` tokens, None for all, and the first `sinks` ones.

    The current token counts.
    """

    size: int | None = None
    sinks: int = 0

    @property
    def reach(self) -> int:
        """The largest distance, and how many keys stay for later calls at most."""
        return MORE_THAN_ANY_DOCUMENT if self.size is None else self.size + self.sinks - 1

    def __str__(self) -> str:
        """The options as a specification has them."""
        sinks = f", sinks={self.sinks}" if self.sinks else ""
        return f"(window={self.size}{sinks})"

    def kept(self, position: int) -> int:
        """How many keys stay after `position` tokens."""
        return min(position, self.reach)


class Rotation(NamedTuple):
    """A rotary encoding of a head's d dimensions: x cos(p f) + s x[partner] sin(p f) at position p.

    Attributes:
        frequency: f, `(d,)` float64; 0 for a dimension that is not rotated.
        partner: the other dimension of each pair, `(d,)` int64.
        sign: s, `(d,)` float64.
        shift: by how many places a roll moves each partner to its dimension; None if none does.
    """

    frequency: Tensor
    partner: Tensor
    sign: Tensor
    shift: int | None = None

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos(p f) and s sin(p f) of positions `(b, t)`, each `(b, 1, t, d)`."""
        device = positions.device
        angles = positions[:, None, :, None].double() * self.frequency.to(device)
        return angles.cos().to(dtype), (angles.sin() * self.sign.to(device)).to(dtype)

    def apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `(b, h, t, d)` by `tables`."""
        if self.shift is not None:  # much faster
            return torch.addcmul(x * cos, x.roll(self.shift, -1), sin)
        return torch.addcmul(x * cos, x.gather(-1, self.partner.to(x.device).expand_as(x)), sin)


class KeysRead(NamedTuple):
    """Which keys the tokens of a call read, and where they are.

    Attributes:
        mask: `(b or 1, 1, t, s + k)` bool, which keys each token reads, far sinks in front; None if
            every token reads all of them.
        positions: `(b or 1, k)` int64, by which the keys are rotated.
        sinks: `(b or 1, s)` int64, the far sinks among the keys; None for none.
        sink_positions: `(b or 1, s)` int64, by which these are rotated.
    """

    mask: Tensor | None
    positions: Tensor
    sinks: Tensor | None = None
    sink_positions: Tensor | None = None


class QueryBlock(NamedTuple):
    """Tokens of a call whose attention is computed together.

    Attributes:
        tokens: which.
        keys: `(k,)` int64, those that they can read, far sinks first.
        mask: `(b or 1, 1, t, k)` bool, which of these keys each token reads.
    """

    tokens: slice
    keys: Tensor
    mask: Tensor


class WindowCall:
    """How the tokens of one call read the keys of a layer, and which keys stay after it.

    Args:
        window: of the layer.
        before: `(b,)` int64, how many tokens of its document each row has read.
        time: tokens of this call in each row.
        rows: where documents and padding begin; None for rows of one document.
    """

    def __init__(
        self, window: AttentionWindow, before: Tensor, time: int, rows: Rows | None
    ) -> None:
        self.window, self._rows, self._before = window, rows, before
        # A call may be kept for later calls, which need gradients.
        self._rotation_tables = cache(torch.inference_mode(False)(Rotation.tables))
        self._mask_to_add = cache(torch.inference_mode(False)(added_mask))
        self._stored = window.kept(int(before.max()))
        self._positions, self.after = positions_of(before, time, rows)
        self._is_even = rows is None and len(before) == 1

    @cached_property
    @torch.inference_mode(False)
    def read(self) -> KeysRead:
        """Which keys the tokens read."""
        window, positions = self.window, self._positions
        stored, is_stored = self._kept(self._stored, self._before)
        keys = torch.cat([stored, positions], 1)
        slots = torch.arange(keys.shape[1], device=keys.device)
        distance = positions[..., None] - keys[:, None]  # (b, t, k)
        reads = slots <= slots[self._stored :, None]
        if not self._is_even:
            own = torch.cat([is_stored, torch.ones_like(positions, dtype=torch.bool)], 1)
            reads = reads & own[:, None]
        if self._rows is not None:
            document = self._rows.is_start.long().cumsum(1)
            of_key = torch.cat([torch.zeros_like(stored), document], 1)
            reads = reads & (document[..., None] == of_key[:, None])
        is_far = positions[..., None] >= window.reach
        to_sink = reads & is_far & (keys < window.sinks)[:, None]
        if positions.shape[1] == 1:
            # Keys are rotated by their distance. All of them are in the window, or sinks.
            far = window.reach - keys[:, None]
            mask = None if self._is_even else reads[:, None]
            return KeysRead(mask, -torch.where(to_sink, far, distance)[:, 0])
        # Keys and tokens are rotated by their distance from the first token. Far sinks are read
        # with a rotation of their own, in front of the other keys.
        mask = reads & (~is_far | (distance < (window.size or MORE_THAN_ANY_DOCUMENT)))
        near = slots[None] - self._stored
        is_sink = to_sink.any(1)
        number = int(is_sink.sum(1).max())
        if not number:
            return KeysRead(mask[:, None], near)
        sinks = (~is_sink).long().argsort(dim=1, stable=True)[:, :number]
        far = to_sink.gather(2, sinks[:, None].expand(-1, to_sink.shape[1], -1))
        mask = torch.cat([far, mask], 2)[:, None]
        return KeysRead(mask, near, sinks, keys.gather(1, sinks) - window.reach)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: Rotation | None,
        attention: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    ) -> Tensor:
        """Return the outputs `(b, t, h, d')` of `attention` for the rotated queries and keys.

        Args:
            query: `(b, h, t, d)` of the last t tokens, not rotated, like the keys.
            key: `(b, h', k, d)`, of the state and of this call.
            value: `(b, h', k, d')`.
            rotation: of the layer; None for none.
            attention: of the model; its last argument is added to the scores.
        """
        near, rotated = key, query
        if rotation is not None:
            cos, sin = self._rotation_tables(rotation, self.read.positions, key.dtype)
            near = rotation.apply(key, cos, sin)
            if self._positions.shape[1] > 1:
                time = query.shape[2]
                rotated = rotation.apply(query, cos[..., -time:, :], sin[..., -time:, :])
        if self.read.sinks is None:
            return self._in_blocks(rotated, near, value, attention)
        far = _gather(key, self.read.sinks)
        if rotation is not None:
            tables = self._rotation_tables(rotation, self.read.sink_positions, key.dtype)
            far = rotation.apply(far, *tables)
        number, groups = far.shape[2], query.shape[1] // key.shape[1]
        product = query.unflatten(1, (-1, groups)) @ far.transpose(-1, -2)[:, :, None]
        unit = torch.eye(number, dtype=key.dtype, device=key.device)
        unit = F.pad(unit, (key.shape[-1], 0)).expand(*far.shape[:2], -1, -1)
        queries = torch.cat([rotated, product.flatten(1, 2)], -1)
        keys = torch.cat([unit, F.pad(near, (0, number))], 2)
        values = torch.cat([_gather(value, self.read.sinks), value], 2)
        # Of equal width, which the fast kernels of torch need.
        values = F.pad(values, (0, max(0, keys.shape[-1] - value.shape[-1])))
        output = self._in_blocks(queries, keys, values, attention)
        return output[..., : value.shape[-1]].contiguous()  # models view it

    def _in_blocks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    ) -> Tensor:
        """`attend` for rotated tensors, with far sinks in front."""
        mask = self.read.mask
        if mask is None:
            return attention(query, key, value, None)
        if query.shape[2] < mask.shape[2]:  # of a layer that computes the last tokens only
            added = self._mask_to_add(mask, query.dtype)
            return attention(query, key, value, added[:, :, -query.shape[2] :])
        outputs = [
            attention(
                query[:, :, block.tokens],
                key.index_select(2, block.keys),
                value.index_select(2, block.keys),
                self._mask_to_add(block.mask, query.dtype),
            )
            for block in self._blocks
        ]
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]

    @cached_property
    @torch.inference_mode(False)
    def _blocks(self) -> list[QueryBlock]:
        """Blocks of a size at which most keys that are read are those of the window."""
        assert self.read.mask is not None
        time, count = self.read.mask.shape[2:]
        slots = torch.arange(count, device=self.read.mask.device)
        # The number of a key in the state and the call; negative for a far sink.
        number = slots - (count - self._stored - time)
        size = min(max(LEAST_BLOCK, self.window.reach // 2), time)
        blocks = []
        for first in range(0, time, size):
            tokens = slice(first, min(time, first + size))
            is_near = number >= self._stored + first - self.window.reach
            keys = slots[(number < 0) | (is_near & (number < self._stored + tokens.stop))]
            blocks.append(QueryBlock(tokens, keys, self.read.mask[:, :, tokens, keys]))
        return blocks

    def keep(self, entries: Tensor) -> Tensor:
        """Return the keys or values, `(b, h, k + t, d)`, that the state after the call holds."""
        size = self.window.kept(int(self.after.max()))
        if self._is_even:
            sinks, first = self.window.sinks, entries.shape[2] - size
            if not first or not sinks:
                return entries[:, :, first:]
            return torch.cat([entries[:, :, :sinks], entries[:, :, first + sinks :]], 2)
        wanted, is_kept = self._kept(size, self.after)
        before = self._before[:, None]
        had = before.clamp(max=self.window.reach)
        old = self._stored + torch.where(wanted < self.window.sinks, wanted - had, wanted - before)
        slot = torch.where(wanted < before, old, self._stored + wanted - before)
        if self._rows is not None and self._rows.has_starts:
            steps = torch.arange(self._rows.is_start.shape[1], device=slot.device)
            start = steps.where(self._rows.is_start, -1).amax(1, keepdim=True)
            slot = torch.where(start >= 0, self._stored + start + wanted, slot)
        return _gather(entries, slot.clamp(min=0)).where(is_kept[:, None, :, None], 0)

    def _kept(self, size: int, read: Tensor) -> tuple[Tensor, Tensor]:
        """The keys that are kept in `size` slots after `read` tokens of each row.

        Returns:
            Their positions, and which slots have one, both `(b, size)`.
        """
        own = read.clamp(max=self.window.reach)[:, None]
        place = torch.arange(size, device=own.device) - (size - own)
        moved = place + read[:, None] - own
        return torch.where(place < self.window.sinks, place, moved), place >= 0


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _even_call(window: AttentionWindow, before: int, time: int, device: torch.device) -> WindowCall:
    """The call of rows that have all read as many tokens, which is the same beyond the reach."""
    return WindowCall(window, torch.tensor([before], device=device), time, None)


def window_calls(
    windows: Sequence[AttentionWindow], before: Tensor, time: int, rows: Rows | None
) -> list[WindowCall]:
    """The `WindowCall` of each layer; layers with one window have one, made before if possible."""
    read, calls = before.tolist(), dict[AttentionWindow, WindowCall]()
    for window in {*windows}:
        if rows is None and min(read) == max(read):
            calls[window] = _even_call(window, window.kept(read[0]), time, before.device)
        else:
            calls[window] = WindowCall(window, before, time, rows)
    return [calls[window] for window in windows]


def added_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to be added to scores, from a bool mask of the keys that are read."""
    zeros = torch.zeros_like(mask, dtype=dtype)
    return zeros.masked_fill(~mask, torch.finfo(dtype).min)


def _gather(entries: Tensor, slots: Tensor) -> Tensor:
    """Entries `(b, h, k, d)` at slots `(b or 1, n)`: `(b, h, n, d)`."""
    if len(slots) == 1:
        return entries.index_select(2, slots[0])
    index = slots[:, None, :, None].expand(-1, entries.shape[1], -1, entries.shape[3])
    return entries.gather(2, index)
