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

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.evaluation.texts import Document, made_by
from longrnn.evaluation.windows import Window, windows
from longrnn.inference.trie import prefill
from longrnn.intervals import Estimate, mean
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.results import Results, Row
from longrnn.state import join, take

# A context is enough if its EffRem is at most this.
ENOUGH = 0.1


class MeanEffRem(NamedTuple):
    """Mean EffRem over stretches, for one T and the start t."""

    start: int
    effrem: Estimate


def starts(position: int) -> list[int]:
    """Return the starts t for a context of `position` = T tokens, ascending."""
    powers = [2**k for k in range(position.bit_length()) if 2**k < position]
    return sorted({*powers, *(position - power for power in powers)})


def evaluate(
    model: LanguageModel,
    documents: Sequence[Document],
    *,
    positions: Sequence[int],
    output: Path,
    stretches: int = 8,
    batch_size: int = 4,
    quiet: bool = False,
) -> list[Row]:
    """Measure EffRem; return all rows, new and earlier ones.

    Args:
        model: any language model.
        documents: the texts.
        positions: values of T in tokens, each at least 2.
        output: the results file, which is resumed; texts and positions may be added.
        stretches: maximum number of stretches of max(positions) tokens per text.
        batch_size: stretches in one pass; each needs one row for the whole context and one per
            start, about 2 · log2(T) in total.
        quiet: show no progress.

    Returns:
        One row per stretch, position and start with `text`, `text_sha256`, `first` (where in the
        text the stretch begins), `position`, `start` and `effrem`.

    Raises:
        UserError: settings out of range, a text shorter than a stretch, or `output` has the
            results of another run.
    """
    if min(stretches, batch_size) < 1:
        raise UserError("stretches and the batch size must be at least 1: give positive numbers")
    if min(positions) < 2:
        raise UserError("a position of 1 has no shorter context: give positions of 2 or more")
    positions = sorted(set(positions))
    cut = [window for d in documents for window in windows(d, positions[-1])[:stretches]]
    header = {
        "evaluation": "memory",
        "model": model.fingerprint(),
        "tokenizer": made_by(documents),
    }
    results = Results(output, header)
    pairs = [(position, start) for position in positions for start in starts(position)]
    done = {_identity(row) for row in results.rows}
    todo = [w for w in cut if not all((*_key(w), *pair) in done for pair in pairs)]
    work = len(todo) * sum(_lifetimes(positions).values())
    with Progress("memory", work, unit="tokens", quiet=quiet) as progress:
        for first in range(0, len(todo), batch_size):
            batch = todo[first : first + batch_size]
            texts = torch.stack([window.tokens()[:-1] for window in batch])
            found = remembrance(model, texts, positions, progress)
            results.append(
                {
                    "text": window.document.name,
                    "text_sha256": window.document.sha256,
                    "first": window.start,
                    "position": position,
                    "start": start,
                    "effrem": float(found[position, start][row]),
                }
                for row, window in enumerate(batch)
                for position, start in pairs
                if (*_key(window), position, start) not in done
            )
    rows = {_identity(row): row for row in results.rows}
    return [rows[*_key(window), *pair] for window in cut for pair in pairs]


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
    end = {0: positions[-1]} | {
        start: position for position in positions for start in starts(position)
    }
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


def _lifetimes(positions: Sequence[int]) -> dict[int, int]:
    """Return the number of tokens that a row of each start reads; the whole context starts at 0."""
    ends = {start: position for position in positions for start in [0, *starts(position)]}
    return {start: end - start for start, end in ends.items()}


def summarise(rows: Sequence[Row]) -> dict[int, list[MeanEffRem]]:
    """Return means over stretches by T, starts ascending.

    Intervals are Student's t, cut to [0, 1].
    """
    values: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        values.setdefault((row["position"], row["start"]), []).append(row["effrem"])
    found: dict[int, list[MeanEffRem]] = {}
    for (position, start), effrem in sorted(values.items()):
        estimate = mean(effrem)
        inside = estimate._replace(low=max(estimate.low, 0.0), high=min(estimate.high, 1.0))
        found.setdefault(position, []).append(MeanEffRem(start, inside))
    return found


def enough(points: Sequence[MeanEffRem], position: int) -> int | None:
    """Return the length of the shortest context whose EffRem, like that of all longer ones, is at
    most ENOUGH; None if the EffRem of every shortened context is larger."""
    shortest = None
    for start, effrem in points:
        if not effrem.mean <= ENOUGH:
            break
        shortest = position - start
    return shortest


def _key(window: Window) -> tuple[str, int]:
    return window.document.sha256, window.start


def _identity(row: Row) -> tuple[str, int, int, int]:
    return row["text_sha256"], row["first"], row["position"], row["start"]
