"""Windows of texts: what one state reads, by tokens of one tokenizer or by the bytes of several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.evaluation.texts import Document
from longrnn.units import format_length


class Window(NamedTuple):
    """The `number`-th window of a document: `length` tokens from token `start` on."""

    document: Document
    number: int
    start: int
    length: int

    def tokens(self) -> Tensor:
        """`(length + 1,)`: what is read, and the last one to predict."""
        return self.document.tokens[self.start : self.start + self.length + 1]

    def n_bytes(self) -> int | None:
        """Bytes that the predicted tokens stand for; None where the tokenizer cannot tell."""
        ends = self.document.byte_ends
        return None if ends is None else int(ends[self.start + self.length] - ends[self.start])


def windows(document: Document, length: int) -> list[Window]:
    """The disjoint windows of a text.

    Raises:
        UserError: a text shorter than one.
    """
    count = (len(document.tokens) - 1) // length
    if count < 1:
        raise UserError(
            f"{document.name} has {len(document.tokens):,} tokens and a window of "
            f"{format_length(length)} needs {length + 1:,} (the last one to be predicted): "
            "give a longer text or a smaller --length"
        )
    return [Window(document, index, index * length, length) for index in range(count)]


def shared_windows(documents: Sequence[Sequence[Document]], length: int) -> list[list[Window]]:
    """Windows in which several models predict the very same bytes.

    A window ends where the first tokenizer has read `length` tokens more, or a little before: at
    the last place where every tokenizer has a border. Of equal tokenizers these are the windows of
    `windows`. A window begins with the token that ends where the one before it ended.

    Args:
        documents: for each model, the same texts in the same order.
        length: tokens of the first model.

    Returns:
        For each model its windows, in the same order.

    Raises:
        UserError: a text shorter than a window; a tokenizer that does not know its bytes, or none
            of whose borders is one of the others.
    """
    found: list[list[Window]] = [[] for _ in documents]
    for texts in zip(*documents, strict=True):
        ends = [text.byte_ends for text in texts]
        if read_alike([[text] for text in texts]):
            for model, text in zip(found, texts, strict=True):
                model += windows(text, length)
            continue
        known = [end for end in ends if end is not None]
        if len(known) < len(ends):
            raise UserError(
                f"models with different tokenizers are compared by the bytes of {texts[0].name}, "
                "and one of the tokenizers does not tell them: measure these models one by one"
            )
        cuts = _cuts(texts[0], known, length)
        for model, text, end in zip(found, texts, known, strict=True):
            # Of tokens that share a last byte, the last one ends there.
            at = (torch.searchsorted(end, cuts, right=True) - 1).tolist()
            model += [
                Window(text, number, start, stop - start)
                for number, (start, stop) in enumerate(pairwise(at))
            ]
    return found


def read_alike(documents: Sequence[Sequence[Document]]) -> bool:
    """Whether the texts are the same tokens for every model."""
    return all(
        torch.equal(text.tokens, texts[0].tokens)
        for texts in zip(*documents, strict=True)
        for text in texts
    )


def _cuts(first: Document, ends: Sequence[Tensor], length: int) -> Tensor:
    """Bytes at which windows begin and end, `(windows + 1,)`, all of them borders of tokens."""
    common = ends[0]
    for end in ends[1:]:
        common = common[torch.isin(common, end)]
    wanted = ends[0][[window.start for window in windows(first, length)]].tolist()
    wanted.append(int(ends[0][len(wanted) * length]))
    places = (torch.searchsorted(common, torch.tensor(wanted), right=True) - 1).clamp(min=0)
    if not len(common) or len(places.unique()) < len(places):
        raise UserError(
            f"the tokenizers of these models share too few borders in {first.name} for windows of "
            f"{format_length(length)} tokens: give a greater --length"
        )
    return common[places]
