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

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

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

    def apply(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate `(b, h, t, d)`."""
        cos, sin = tables
        if self.shift is not None:  # much faster
            return torch.addcmul(x * cos, x.roll(self.shift, -1), sin)
        return torch.addcmul(x * cos, x.gather(-1, self.partner.to(x.device).expand_as(x)), sin)


class QueryBlock(NamedTuple):
    """Tokens of a call whose attention is computed together.

    Attributes:
        tokens: which.
        keys: those that they can read, beside far sinks.
        mask: `(b or 1, 1, t, n + k)` bool, which of n far sinks and these keys each token reads.
    """

    tokens: slice
    keys: slice
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
        self._stored = window.kept(int(before.max()))
        positions, self._after = positions_of(before, time, rows)
        self._own = before.clamp(max=window.reach)
        place = self._places(self._stored, self._own)
        stored = self._positions(place, before, self._own)
        self._is_even = rows is None and len(before) == 1
        self._tables: dict[Any, Any] = {}
        self._rotates_queries = time > 1
        keys = torch.cat([stored, positions], 1)
        slots = torch.arange(keys.shape[1], device=keys.device)
        distance = positions[..., None] - keys[:, None]  # (b, t, k)
        reads = slots <= slots[self._stored :, None]
        if not self._is_even:
            own = torch.cat([place >= 0, torch.ones_like(positions, dtype=torch.bool)], 1)
            reads = reads & own[:, None]
        if rows is not None:
            document = rows.is_start.long().cumsum(1)
            of_key = torch.cat([torch.zeros_like(stored), document], 1)
            reads = reads & (document[..., None] == of_key[:, None])
        is_far = positions[..., None] >= window.reach
        to_sink = reads & is_far & (keys < window.sinks)[:, None]
        if time == 1:
            self._one_token(distance, keys, reads, to_sink)
        else:
            in_window = reads & (~is_far | (distance < (window.size or MORE_THAN_ANY_DOCUMENT)))
            self._several(keys, in_window, to_sink)

    def _one_token(self, distance: Tensor, keys: Tensor, reads: Tensor, to_sink: Tensor) -> None:
        """Rotate keys by their distance; the token itself is not rotated."""
        far = self.window.reach - keys
        self._key_positions = -torch.where(to_sink[:, 0], far, distance[:, 0])
        self._sinks = self._sink_positions = None
        # All stored keys are inside the window, or sinks.
        self._mask = None if self._is_even else reads[:, None]

    def _several(self, keys: Tensor, in_window: Tensor, to_sink: Tensor) -> None:
        """Rotate keys and tokens by their distance from the first token."""
        count = keys.shape[1]
        self._key_positions = torch.arange(count, device=keys.device)[None] - self._stored
        is_sink = to_sink.any(1)
        number = int(is_sink.sum(1).max())
        self._sinks = self._sink_positions = None
        if number:
            self._sinks = (~is_sink).long().argsort(dim=1, stable=True)[:, :number]
            self._sink_positions = keys.gather(1, self._sinks) - self.window.reach
            far = to_sink.gather(2, self._sinks[:, None].expand(-1, to_sink.shape[1], -1))
            in_window = torch.cat([far, in_window], 2)
        self._mask = in_window[:, None]

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
            near = rotation.apply(key, self._table(rotation, "_key_positions", key.dtype))
            if self._rotates_queries:
                tables = self._table(rotation, "_key_positions", key.dtype)
                cos, sin = (table[..., -query.shape[2] :, :] for table in tables)
                rotated = rotation.apply(query, (cos, sin))
        if self._sinks is None:
            return self._in_blocks(rotated, near, value, None, attention)
        far = _gather(key, self._sinks)
        if rotation is not None:
            far = rotation.apply(far, self._table(rotation, "_sink_positions", key.dtype))
        number, groups = far.shape[2], query.shape[1] // key.shape[1]
        product = query.unflatten(1, (-1, groups)) @ far.transpose(-1, -2)[:, :, None]
        unit = torch.eye(number, dtype=key.dtype, device=key.device)
        unit = F.pad(unit, (key.shape[-1], 0)).expand(*far.shape[:2], -1, -1)
        # Of equal width, which the fast kernels of torch need.
        wider = max(0, unit.shape[-1] - value.shape[-1])
        values, sinks = F.pad(value, (0, wider)), F.pad(_gather(value, self._sinks), (0, wider))
        queries = torch.cat([rotated, product.flatten(1, 2)], -1)
        keys = F.pad(near, (0, number))
        output = self._in_blocks(queries, keys, values, (unit, sinks), attention)
        return output[..., : value.shape[-1]].contiguous()  # models view it

    def _in_blocks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: tuple[Tensor, Tensor] | None,
        attention: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    ) -> Tensor:
        """`attend` for rotated tensors, with the keys and values of far sinks apart."""
        if self._mask is None:
            return attention(query, key, value, None)
        blocks = self._blocks
        if query.shape[2] < self._mask.shape[2]:  # of a layer that computes the last tokens only
            mask = self._mask[:, :, -query.shape[2] :]
            blocks = [QueryBlock(slice(None), slice(None), mask)]
        outputs = []
        for block in blocks:
            keys, values = key[:, :, block.keys], value[:, :, block.keys]
            if sinks is not None:
                keys, values = torch.cat([sinks[0], keys], 2), torch.cat([sinks[1], values], 2)
            mask = self._added(block.mask, query.dtype)
            outputs.append(attention(query[:, :, block.tokens], keys, values, mask))
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]

    @cached_property
    def _blocks(self) -> list[QueryBlock]:
        """Blocks of a size at which most keys that are read are those of the window."""
        assert self._mask is not None
        sinks = 0 if self._sinks is None else self._sinks.shape[1]
        time, blocks = self._mask.shape[2], []
        size = min(max(LEAST_BLOCK, self.window.reach // 2), time)
        for first in range(0, time, size):
            stop = min(time, first + size)
            keys = slice(max(0, self._stored + first - self.window.reach), self._stored + stop)
            mask = self._mask[:, :, first:stop]
            near = mask[..., sinks + keys.start : sinks + keys.stop]
            mask = torch.cat([mask[..., :sinks], near], -1)
            blocks.append(QueryBlock(slice(first, stop), keys, mask))
        return blocks

    def _added(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """A mask to be added to scores, which is made once."""
        key = id(mask), dtype
        if key not in self._tables:
            self._tables[key] = mask, added_mask(mask, dtype)
        return self._tables[key][1]

    def _table(self, rotation: Rotation, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = id(rotation), name, dtype
        if key not in self._tables:
            # With the rotation, so that its id stays its own.
            self._tables[key] = rotation, rotation.tables(getattr(self, name), dtype)
        return self._tables[key][1]

    def keep(self, entries: Tensor) -> Tensor:
        """Return the keys or values, `(b, h, k + t, d)`, that the state after the call holds."""
        size = self.window.kept(int(self._after.max()))
        if self._is_even:
            sinks, first = self.window.sinks, entries.shape[2] - size
            if not first or not sinks:
                return entries[:, :, first:]
            return torch.cat([entries[:, :, :sinks], entries[:, :, first + sinks :]], 2)
        own = self._after.clamp(max=self.window.reach)
        place = self._places(size, own)
        wanted = self._positions(place, self._after, own)
        before, had = self._before[:, None], self._own[:, None]
        offset = self._stored - had
        old = offset + torch.where(wanted < self.window.sinks, wanted, wanted - before + had)
        slot = torch.where(wanted < before, old, self._stored + wanted - before)
        if self._rows is not None and self._rows.has_starts:
            steps = torch.arange(self._rows.is_start.shape[1], device=slot.device)
            start = steps.where(self._rows.is_start, -1).amax(1, keepdim=True)
            slot = torch.where(start >= 0, self._stored + start + wanted, slot)
        kept = _gather(entries, slot.clamp(min=0))
        return kept.where((place >= 0)[:, None, :, None], 0)

    def _places(self, size: int, own: Tensor) -> Tensor:
        """Which of a row's own keys each of `size` slots holds, `(b, size)`; negative for none."""
        return torch.arange(size, device=own.device) - (size - own)[:, None]

    def _positions(self, place: Tensor, read: Tensor, own: Tensor) -> Tensor:
        """The position of a row's own keys by their number, after `read` tokens."""
        return torch.where(place < self.window.sinks, place, place + (read - own)[:, None])


@lru_cache(maxsize=16)
def _even_call(window: AttentionWindow, before: int, time: int, device: torch.device) -> WindowCall:
    """The call of rows that have all read as many tokens, which is the same beyond the reach."""
    return WindowCall(window, torch.tensor([before], device=device), time, None)


def window_call(
    window: AttentionWindow, before: Tensor, time: int, rows: Rows | None
) -> WindowCall:
    """`WindowCall` of these arguments, or one that was made before for such rows."""
    read = before.tolist()
    if rows is None and min(read) == max(read):
        return _even_call(window, window.kept(read[0]), time, before.device)
    return WindowCall(window, before, time, rows)


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
