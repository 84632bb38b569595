"""Windows of texts, cut by the tokens of one tokenizer or at bytes that several share."""

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
    """The `number`-th window of a document: `length` tokens, beginning with token `start`."""

    document: Document
    number: int
    start: int
    length: int

    def tokens(self) -> Tensor:
        """Return the tokens, `(length + 1,)`; the last one is only predicted."""
        return self.document.tokens[self.start : self.start + self.length + 1]

    def n_bytes(self) -> int | None:
        """Return the number of bytes of the predicted tokens; None if it is not known."""
        found = self.bytes_between([0, self.length])
        return None if found is None else found[0]

    def bytes_between(self, edges: Sequence[int]) -> list[int] | None:
        """Return the number of bytes of the predicted tokens between consecutive edges.

        Args:
            edges: positions in the window, ascending.

        Returns:
            One number fewer than there are edges; None if byte offsets are not known.
        """
        ends = self.document.byte_ends
        if ends is None:
            return None
        return ends[self.start + torch.tensor(edges)].diff().tolist()


def windows(document: Document, length: int) -> list[Window]:
    """Return the disjoint windows of a text.

    Raises:
        UserError: the text is shorter than one window.
    """
    count = (len(document.tokens) - 1) // length
    if count < 1:
        raise UserError(
            f"{document.name} has {len(document.tokens):,} tokens and a window of "
            f"{format_length(length)} needs {length + 1:,} (the last one is only predicted): "
            "give a longer text or a smaller --length"
        )
    return [Window(document, index, index * length, length) for index in range(count)]


def shared_windows(documents: Sequence[Sequence[Document]], length: int) -> list[list[Window]]:
    """Return windows in which several models predict the same bytes.

    A window ends `length` tokens of the first tokenizer after the one before it, or slightly
    earlier (see `shared_places`). It begins with the token that ends where the one before it ended.
    With equal tokenizers, these are the windows of `windows`.

    Args:
        documents: for each model, the same texts in the same order.
        length: tokens of the first model.

    Returns:
        For each model its windows, in the same order.

    Raises:
        UserError: a text is shorter than a window, the byte offsets of a tokenizer are not known,
            or the tokenizers share too few token borders.
    """
    found: list[list[Window]] = [[] for _ in documents]
    for texts in zip(*documents, strict=True):
        count = len(windows(texts[0], length))
        places = shared_places(texts, [number * length for number in range(count + 1)])
        for model, text, at in zip(found, texts, places, strict=True):
            model += [
                Window(text, number, start, stop - start)
                for number, (start, stop) in enumerate(pairwise(at))
            ]
    return found


def shared_places(texts: Sequence[Document], places: Sequence[int]) -> list[list[int]]:
    """Return tokens of several tokenizers that end at the same bytes of one text.

    Args:
        texts: the text, tokenized for each model.
        places: indices of tokens of the first model, ascending.

    Returns:
        For each model the index of a token for each of `places`: the token that ends at the last
        byte that is a token border of all tokenizers and not after the end of the first model's
        token. If all models have the same tokens, these are `places`.

    Raises:
        UserError: the byte offsets of a tokenizer are not known, or there are too few common
            borders.
    """
    if read_alike([[text] for text in texts]):
        return [list(places) for _ in texts]
    ends = [text.byte_ends for text in texts if text.byte_ends is not None]
    if len(ends) < len(texts):
        raise UserError(
            f"models with different tokenizers are compared by the bytes of {texts[0].name}, "
            "and one of the tokenizers has no byte offsets: measure these models one by one"
        )
    cuts = _cuts(texts[0].name, ends, places)
    # Of several tokens that end at one byte, take the last.
    return [(torch.searchsorted(end, cuts, right=True) - 1).tolist() for end in ends]


def read_alike(documents: Sequence[Sequence[Document]]) -> bool:
    """Whether the texts have the same tokens for every model."""
    return all(
        torch.equal(text.tokens, texts[0].tokens)
        for texts in zip(*documents, strict=True)
        for text in texts
    )


def _cuts(name: str, ends: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    """Return the last common token borders, in bytes, not after the first model's `places`."""
    common = ends[0]
    for end in ends[1:]:
        common = common[torch.isin(common, end)]
    wanted = ends[0][torch.tensor(places)]
    found = (torch.searchsorted(common, wanted, right=True) - 1).clamp(min=0)
    if not len(common) or len(found.unique()) < len(found):
        raise UserError(
            f"the tokenizers of these models share too few borders in {name} for windows of "
            f"{format_length(min(b - a for a, b in pairwise(places)))} tokens: give a greater "
            "--length"
        )
    return common[found]
