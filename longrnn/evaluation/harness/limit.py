"""Truncates requests to the maximum length of a model, and counts what was cut."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from longrnn.errors import UserError
from longrnn.inference.engine import Pair
from longrnn.inference.trie import Ids

logger = logging.getLogger(__name__)


class Limit:
    """Truncates requests as lm-eval's `hf` type does, and counts what was cut.

    Args:
        max_length: maximum length of a sequence in tokens; None for no limit.

    Attributes:
        truncated: counts of truncated `requests`, of the `tokens` cut from them, and of
            `split_documents`.
    """

    def __init__(self, max_length: int | None) -> None:
        if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
            raise UserError(
                f"max_length must be a whole number above 0, not {max_length!r}: give a number of "
                "tokens"
            )
        self.max_length = max_length
        self.truncated = {"requests": 0, "tokens": 0, "split_documents": 0}

    def fit(self, context: Sequence[int], more: int) -> Ids:
        """Return the end of a context that fits in front of `more` further tokens."""
        if self.max_length is None or len(context) + more <= self.max_length:
            return tuple(context)
        room = self.max_length - more
        if room < 1:
            raise UserError(
                f"{more} tokens to score or to generate leave no room for a context: the model "
                f"reads at most {self.max_length}; use shorter continuations"
            )
        self.truncated["requests"] += 1
        self.truncated["tokens"] += len(context) - room
        return tuple(context[-room:])

    def windows(self, ids: list[int], prefix: int) -> list[Pair]:
        """Return a document after the token `prefix` as one pair, or as pairs that fit."""
        longest = self.max_length or len(ids) or 1
        windows = get_rolling_token_windows(ids, prefix, max_seq_len=longest, context_len=1)
        pairs = [Pair(tuple(a), tuple(b)) for a, b in map(make_disjoint_window, windows)]
        self.truncated["split_documents"] += len(pairs) > 1
        return pairs

    def report(self) -> None:
        """Log a warning about what was cut so far."""
        cut = self.truncated
        if cut["requests"]:
            logger.warning(
                f"{cut['requests']} contexts were truncated from the left, by {cut['tokens']:,} "
                f"tokens in all: the model reads at most {self.max_length:,}"
            )
        if cut["split_documents"]:
            logger.warning(
                f"{cut['split_documents']} documents were read in windows of {self.max_length:,} "
                "tokens, the most that the model reads"
            )
