"""Effective remembrance: how much a prediction depends on the beginning of its context.

EffRem_T(t) = d(q(·|x[0:T]), q(·|x[t:T])) (arXiv 2507.02782), where d is the total variation between
the predictions of the next token after all T tokens and after the last T − t of them. Near 0 the
first t tokens do not matter; near 1 for a small t, the prediction depends on the first tokens.

Notable choices:
- The shortened context starts from the empty state at position 0, as published. For a model with
  position encodings, the different positions are part of the difference.
- Starts are T − 1, T − 2, T − 4, …, so that the number of tokens that a prediction depends on is
  known within a factor of 2. One pass from a start serves every T that has it.
- Intervals are over stretches of text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Sample
from longrnn.evaluation.options import MemoryOptions
from longrnn.evaluation.texts import read_documents
from longrnn.evaluation.windows import Window, cut_windows
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.trie import prefill
from longrnn.intervals import SCORE, mean
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.results import Row
from longrnn.units import format_length

# A context is enough if its EffRem is at most this.
ENOUGH = 0.1


class Memory(MemoryOptions, Evaluation):
    """Effective remembrance, see `MemoryOptions`."""

    kind: ClassVar[str] = "memory"
    across: ClassVar[str] = "last tokens kept"

    def files(self) -> list[Path]:
        return list(self.texts)

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        if self.positions[0] < 2:
            raise UserError("a position of 1 has no shorter context: give positions of 2 or more")
        for model in models:
            reached = [at for at in self.positions if self.reaches(model, at, self._column(at), at)]
            work = sum(ends[-1] - start for start, ends in compared(reached).items() if ends)
            windows: list[Window] = []
            for document in read_documents(self.texts, model.tokenizer, model.model):
                cut = cut_windows([document], self.positions, None, [math.inf])[0]
                windows += cut[: self.stretches]
            self._items[model.name] = [
                Item(
                    {"text": one.document.sha256[:16], "start": one.start, "positions": reached},
                    one.tokens()[:-1],
                    work=work,
                )
                for one in windows
                if reached
            ]

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        for first in range(0, len(items), self.batch_size):
            batch = items[first : first + self.batch_size]
            texts, positions = [item.spec for item in batch], batch[0].key["positions"]
            found = remembrance(model.model, torch.stack(texts), positions, progress)
            rows: list[Row] = [{str(at): {} for at in positions} for _ in batch]
            for (position, start), values in found.items():
                for row, value in zip(rows, values.tolist(), strict=True):
                    row[str(position)][str(position - start)] = value
            yield list(zip(batch, rows, strict=True))

    def samples(self, item: Item, row: Row) -> Iterator[Sample]:
        name = f"{item.key['text']}/{item.key['start']}"
        for position, values in row.items():
            for kept, value in values.items():
                yield Sample(self._column(int(position)), int(kept), name, value)

    def _column(self, position: int) -> Column:
        return Column(f"EffRem, T = {format_length(position)}", SCORE, ".3f")

    def notes(self, model: OpenCheckpoint, found: Found) -> list[str]:
        """Say what the prediction after the longest context depends on."""
        if not found:
            return []
        position = found[0][0].key["positions"][-1]
        rows = [row[str(position)] for _, row in found]
        shortest = enough({int(kept): mean([row[kept] for row in rows]).mean for kept in rows[0]})
        if shortest is None:
            said = f"no shorter context that was measured predicts within {ENOUGH:g} of the whole"
        else:
            said = f"the last {shortest:,} predict within {ENOUGH:g} of all of them"
        return [f"After {format_length(position)} tokens, {said}."]


def compared(positions: Sequence[int]) -> dict[int, list[int]]:
    """Return the positions T after which each start t is compared: 0, and T less a power of 2."""
    found = {0: list(positions)}
    for at in positions:
        for kept in (2**k for k in range(at.bit_length())):
            if kept < at:
                found.setdefault(at - kept, []).append(at)
    return found


@torch.no_grad()
def remembrance(
    model: LanguageModel,
    texts: Tensor,
    positions: Sequence[int],
    progress: Progress | None = None,
) -> dict[tuple[int, int], Tensor]:
    """Return EffRem by (T, t), each `(b,)` float64 on the CPU.

    Args:
        model: any language model.
        texts: `(b, t)` int64, t >= max(positions).
        positions: values of T, ascending.
        progress: counts the tokens.
    """
    progress = progress or Progress("memory", 0, unit="tokens", quiet=True)
    whole: dict[int, Tensor] = {}
    found: dict[tuple[int, int], Tensor] = {}
    for start, stops in compared(positions).items():
        state, place = model.init_state(len(texts)), start
        for stop in stops:
            logits, state = prefill(
                model, lambda a, b: texts[:, a:b], place, stop, state, progress, items=True
            )
            place, chances = stop, torch.softmax(logits.double(), -1).cpu()
            if start == 0:
                whole[stop] = chances
            else:
                found[stop, start] = (chances - whole[stop]).abs().sum(-1) / 2
    return found


def enough(means: Mapping[int, float]) -> int | None:
    """Return the length of the shortest context whose EffRem, like that of all longer ones, is at
    most ENOUGH; None if the EffRem of every shortened context is larger.

    Args:
        means: EffRem by the number of tokens kept.
    """
    longest_first = sorted(means, reverse=True)
    return min(takewhile(lambda kept: means[kept] <= ENOUGH, longest_first), default=None)
