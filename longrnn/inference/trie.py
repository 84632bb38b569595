"""Reads many texts in batches; beginnings that they share are read once, and the state is forked.

Texts of different lengths need no padding, which would enter the state: all rows of a batch are
read up to the end of the shortest, which then leaves the batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from longrnn.models import LanguageModel
from longrnn.models.finite import explain_nonfinite
from longrnn.progress import Progress
from longrnn.state import LMState, join, leaves, take

Ids: TypeAlias = tuple[int, ...]

# Tokens per row in one call that returns at most the logits after its last token.
PREFILL_TOKENS = 16384
# Tokens per row in one call that returns all logits.
SCORED_TOKENS = 4096
# A fork must save at least this many tokens; otherwise reading the rows in one batch is faster.
MIN_SAVED_TOKENS = 256
# Texts are sorted by the bytes of these, which keeps those with one beginning together.
ID = np.dtype(np.int32)


class ReadTexts(NamedTuple):
    """Texts of which all tokens have been read.

    Attributes:
        numbers: their numbers, one per row.
        logits: `(b, v)` after their last tokens; `(b, 0)` if none was read after the fork.
        state: after their last tokens.
    """

    numbers: list[int]
    logits: Tensor
    state: LMState


class Branch(NamedTuple):
    """Texts that begin with the same tokens.

    Attributes:
        numbers: their numbers, in sorted order of the texts.
        read: how many of the tokens have been read.
        state: after them, of one row.
    """

    numbers: list[int]
    read: int
    state: LMState


class Remainder(NamedTuple):
    """What is unread of text `number`, its ids from a fork on, and the state there, of one row."""

    number: int
    ids: np.ndarray
    state: LMState


def prefill(
    model: LanguageModel,
    tokens: Tensor,
    state: LMState,
    progress: Progress,
    *,
    keep: int = 1,
    items: bool = False,
) -> tuple[Tensor, LMState]:
    """Consumes tokens in calls of bounded memory.

    Args:
        model: any language model.
        tokens: `(b, t)` integers on any device, t >= 0.
        state: of `b` rows, before the tokens.
        progress: counts the tokens.
        keep: 1 for the logits after the last token, 0 for none.
        items: whether tokens are also the items of the progress bar.

    Returns:
        The logits after the last token, `(b, v)`, or `(b, 0)` if there are none; and the state.

    Raises:
        UserError: logits that are not finite; names the first such token.
    """
    last, before = torch.empty(len(tokens), 0), state
    if not tokens.shape[1]:
        return last, state
    for piece in tokens.split(PREFILL_TOKENS, dim=1):
        logits, state = model(piece.to(state.position.device), state, keep=keep)
        progress.advance(piece.numel() if items else 0, piece.numel())
        last = logits[:, -1] if keep else last
    results = [last] if keep else [leaf for _, leaf in leaves(state.layers)]
    if not all(bool(result.isfinite().all()) for result in results):
        explain_nonfinite(model, tokens, before)
    return last, state


def read_texts(
    model: LanguageModel,
    texts: Iterable[Ids | Tensor],
    batch_size: int,
    progress: Progress,
    *,
    keep: int = 1,
) -> Iterator[ReadTexts]:
    """Reads texts from the initial state, of which equal ones are read once and forked.

    Args:
        model: any language model.
        texts: token ids, of any lengths; each is held once, as int32.
        batch_size: rows per batch.
        progress: counts the tokens that are computed.
        keep: 1 for the logits after the last token, 0 for none.

    Yields:
        All texts, in batches.
    """
    equal: dict[bytes, list[int]] = {}
    for number, text in enumerate(texts):
        equal.setdefault(np.asarray(text, dtype=ID).tobytes(), []).append(number)
    distinct = sorted(equal)
    for read in _read_distinct(model, distinct, batch_size, progress, keep):
        forks = [(row, i) for row, n in enumerate(read.numbers) for i in equal[distinct[n]]]
        for first in range(0, len(forks), batch_size):
            rows, numbers = zip(*forks[first : first + batch_size], strict=True)
            yield ReadTexts(list(numbers), read.logits[list(rows)], take(read.state, rows))


def _read_distinct(
    model: LanguageModel, texts: Sequence[bytes], batch_size: int, progress: Progress, keep: int
) -> Iterator[ReadTexts]:
    """Reads distinct texts in sorted order."""
    ids = [np.frombuffer(text, ID) for text in texts]
    remainders: list[Remainder] = []
    stack = [Branch(list(range(len(ids))), 0, model.init_state(1))] if ids else []
    while stack:
        numbers, read, state = stack.pop()
        first, last = ids[numbers[0]], ids[numbers[-1]]
        # Of sorted texts, the first and the last share what all of them share.
        shared = _shared(first, last)
        if (shared - read) * (len(numbers) - 1) >= MIN_SAVED_TOKENS:
            _, state = prefill(model, _columns([first], read, shared), state, progress, keep=0)
            read = shared
        for _, group in groupby(numbers, key=lambda number: ids[number][shared:][:1].tobytes()):
            branch = list(group)
            # The beginning of all others, or a text that is like no other.
            if len(branch) == 1 or len(ids[branch[0]]) <= shared + 1:
                number = branch.pop(0)
                remainders.append(Remainder(number, ids[number][read:], state))
            if branch:
                stack.append(Branch(branch, read, state))
        # Rows of as many forks as a batch has rows wait for others of similar lengths.
        if not stack or len({id(text.state) for text in remainders}) >= batch_size:
            remainders.sort(key=lambda text: len(text.ids))
            for start in range(0, len(remainders), batch_size):
                batch = remainders[start : start + batch_size]
                yield from _read_remainders(model, batch, progress, keep)
            remainders = []


def _shared(text: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts share, leaving at least one token of each."""
    size = min(len(text), len(other))
    differs = text[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else max(0, size - 1)


def _read_remainders(
    model: LanguageModel, rows: list[Remainder], progress: Progress, keep: int
) -> Iterator[ReadTexts]:
    """Reads texts, the shortest first, in one batch that each row leaves at its end."""
    state, position = join([row.state for row in rows]), 0
    while rows:
        stop = len(rows[0].ids)
        tokens = _columns([row.ids for row in rows], position, stop)
        logits, state = prefill(model, tokens, state, progress, keep=keep)
        due = sum(len(row.ids) == stop for row in rows)
        ended = take(state, range(due))
        yield ReadTexts([row.number for row in rows[:due]], logits[:due], ended)
        if due < len(rows):
            state = take(state, range(due, len(rows)))
        rows, position = rows[due:], stop


def _columns(texts: list[np.ndarray], start: int, stop: int) -> Tensor:
    """Returns the same positions of several texts as a batch, `(b, stop − start)` int32."""
    return torch.from_numpy(np.stack([text[start:stop] for text in texts]))
