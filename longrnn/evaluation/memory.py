"""Effective remembrance: how much a prediction depends on the beginning of its context.

EffRem_T(t) = d(q(·|x[0:T]), q(·|x[t:T])) (arXiv 2507.02782), where d is the total variation between
the predictions of the next token after all T tokens and after the last T − t of them. Near 0 the
first t tokens do not matter; near 1 for a small t, the prediction depends on the first tokens.

Notable choices:
- The shortened context starts from the empty state at position 0, as published. For a model with
  position encodings, the different positions are part of the difference.
- All contexts are read in one pass: a row with an empty state joins the batch when the pass reaches
  its start t, and serves every T after it. No token is read twice for the same t.
- Starts are 1, 2, 4, … and T − 1, T − 2, T − 4, …, which resolve the first and the last tokens
  within a factor of 2. If T is a power of two, they include ¼, ½ and ¾ of it.
- Intervals are over stretches of text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from pydantic import PrivateAttr
from torch import Tensor

from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Measurement
from longrnn.evaluation.options import MemoryOptions
from longrnn.evaluation.texts import read_documents
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.engine import out_of_reach
from longrnn.inference.trie import prefill
from longrnn.intervals import MEAN, Estimate, mean
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.state import join, take
from longrnn.units import format_length

if TYPE_CHECKING:
    from longrnn.evaluation.base import Cell
    from longrnn.evaluation.report import Picture

# A context is enough if its EffRem is at most this.
ENOUGH = 0.1


def _distance(values: Sequence[float], _: float | None) -> Estimate:
    estimate = mean(values)
    if estimate.n == 1:
        return estimate
    return estimate._replace(low=max(estimate.low, 0.0), high=min(estimate.high, 1.0))


# Distances from 0 to 1, whose interval is cut to that.
DISTANCE = MEAN._replace(estimate=_distance)


class Stretch(NamedTuple):
    """Tokens of a text, and the positions after which predictions are compared."""

    text: str
    start: int
    tokens: Tensor
    positions: list[int]


class Memory(MemoryOptions, Evaluation):
    """Effective remembrance, see `MemoryOptions`."""

    kind: ClassVar[str] = "memory"
    across: ClassVar[str] = "last tokens kept"

    _cut: dict[str, list[Stretch]] = PrivateAttr(default_factory=dict)

    def files(self) -> list[Path]:
        return list(self.texts)

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        if self.positions[0] < 2:
            raise UserError("a position of 1 has no shorter context: give positions of 2 or more")
        longest = self.positions[-1]
        for model in models:
            reached = [at for at in self.positions if out_of_reach(model.model, at) is None]
            cut = self._cut[model.name] = []
            for document in read_documents(self.texts, model.tokenizer, model.model):
                count = min((len(document.tokens) - 1) // longest, self.stretches)
                if count < 1:
                    raise UserError(
                        f"{document.name} has {len(document.tokens):,} tokens and a stretch of "
                        f"{format_length(longest)} needs {longest + 1:,}: give a longer text or "
                        "smaller --positions"
                    )
                for start in range(0, count * longest, longest) if reached else ():
                    tokens = document.tokens[start : start + longest]
                    cut.append(Stretch(document.sha256[:16], start, tokens, reached))

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return {}

    def items(self, model: OpenCheckpoint) -> list[Item]:
        return [
            Item(
                {"text": one.text, "start": one.start, "positions": one.positions},
                one,
                (one.text, one.start),
                sum(end - start for start, end in ends(one.positions).items()),
            )
            for one in self._cut[model.name]
        ]

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        for first in range(0, len(items), self.batch_size):
            batch = items[first : first + self.batch_size]
            texts, positions = [item.spec.tokens for item in batch], batch[0].spec.positions
            found = remembrance(model.model, torch.stack(texts), positions, progress)
            values = [
                {str(at): [float(found[at, t][row]) for t in starts(at)] for at in positions}
                for row in range(len(batch))
            ]
            yield list(zip(batch, values, strict=True))

    def columns(self, model: OpenCheckpoint, found: Found) -> list[Measurement]:
        measurements = []
        for position in self.positions:
            column = Column(f"EffRem, T = {format_length(position)}", DISTANCE, ".3f")
            reason = out_of_reach(model.model, position)
            if reason is not None:
                measurements.append(Measurement(column, position, {}, reason))
            for kept, samples in by_kept(found, position).items():
                if kept & (kept - 1) == 0:
                    measurements.append(Measurement(column, kept, samples))
        return measurements

    def notes(self, model: OpenCheckpoint, found: Found) -> list[str]:
        """Say in two sentences what the prediction after the longest context depends on."""
        if not found:
            return []
        position = found[0][0].spec.positions[-1]
        samples = by_kept(found, position)
        means = {kept: mean(list(values.values())).mean for kept, values in samples.items()}
        # The most tokens that are left out, of at most a 64th.
        kept = next(kept for kept in means if position - kept <= max(1, position // 64))
        shortest = enough(means)
        dependence = f"No shorter context predicts within {ENOUGH:g} of the whole one."
        if shortest is not None:
            dependence = (
                f"The last {shortest:,} tokens predict within {ENOUGH:g} of the whole context, and "
                "so does every longer context that was measured."
            )
        return [
            f"After {format_length(position)} tokens the prediction changes by {means[kept]:.3f} "
            f"(of at most 1) if the first {format_length(position - kept)} are left out. "
            f"{dependence}"
        ]

    def pictures(
        self, cells: Sequence[Cell], found: Mapping[str, Found], models: Sequence[OpenCheckpoint]
    ) -> list[Picture]:
        from longrnn.evaluation.figures import Line, lines, png
        from longrnn.evaluation.report import Picture, picture_name

        by_start, by_length = [], []
        for (name, own), position in product(found.items(), self.positions):
            points = by_kept(own, position)
            label = f"T = {format_length(position)}"
            label = f"{name}, {label}" if len(found) > 1 else label
            values = [_distance(list(one.values()), None) for one in points.values()]
            if points:
                by_start.append(Line(label, [position - kept for kept in points], values))
                by_length.append(Line(label, list(points), values))
        return [
            Picture(
                picture_name(self.title, name),
                f"EffRem by the number of {across}, one line for each context length T.",
                png(
                    lines(drawn, across=across, up="EffRem (total variation)", limits=(-0.02, 1.02))
                ),
            )
            for name, across, drawn in (
                ("by start", "first tokens left out", by_start),
                ("by kept", self.across, by_length),
            )
            if drawn
        ]


def by_kept(found: Found, position: int) -> dict[int, dict[str, float]]:
    """Return samples of EffRem by the number of last tokens kept, the shortest context first."""
    rows = {str(i.group): row[str(position)] for i, row in found if position in i.spec.positions}
    return {
        position - start: {name: values[k] for name, values in rows.items()}
        for k, start in reversed([*enumerate(starts(position))])
        if rows
    }


def starts(position: int) -> list[int]:
    """Return the starts t for a context of `position` = T tokens, ascending."""
    powers = [2**k for k in range(position.bit_length()) if 2**k < position]
    return sorted({*powers, *(position - power for power in powers)})


def ends(positions: Sequence[int]) -> dict[int, int]:
    """Return the last position that each start, and 0, is needed for."""
    return {0: positions[-1]} | {start: at for at in positions for start in starts(at)}


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
    n = len(texts)
    end = ends(positions)
    # The rows of the batch are groups of n, one group per start; the whole context is the first.
    groups, state, place = [0], model.init_state(n), 0
    found: dict[tuple[int, int], Tensor] = {}
    for stop in sorted({*end, *positions} - {0}):
        rows = texts.repeat(len(groups), 1)
        logits, state = prefill(
            model, lambda a, b, rows=rows: rows[:, a:b], place, stop, state, progress, items=True
        )
        place = stop
        if stop in positions:
            chances = torch.softmax(logits.double(), -1).view(len(groups), n, -1)
            distances = (chances - chances[0]).abs().sum(-1).cpu() / 2
            wanted = set(starts(stop))
            found |= {(stop, t): distances[g] for g, t in enumerate(groups) if t in wanted}
        active = [group for group, start in enumerate(groups) if end[start] > stop]
        state = take(state, [group * n + row for group in active for row in range(n)])
        groups = [groups[group] for group in active]
        if stop in end:
            groups.append(stop)
            state = join([state, model.init_state(n)])
    return found


def enough(means: Mapping[int, float]) -> int | None:
    """Return the length of the shortest context whose EffRem, like that of all longer ones, is at
    most ENOUGH; None if the EffRem of every shortened context is larger.

    Args:
        means: EffRem by the number of tokens kept.
    """
    shortest = None
    for kept in sorted(means, reverse=True):
        if not means[kept] <= ENOUGH:
            break
        shortest = kept
    return shortest
