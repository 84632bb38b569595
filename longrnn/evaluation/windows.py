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
        found = self.bytes_between([0, self.length])
        return None if found is None else found[0]

    def bytes_between(self, edges: Sequence[int]) -> list[int] | None:
        """Bytes of the tokens that are predicted at the positions from each edge up to the next.

        None where the tokenizer cannot tell.
        """
        ends = self.document.byte_ends
        if ends is None:
            return None
        return ends[self.start + torch.tensor(edges)].diff().tolist()


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

    A window ends where the first tokenizer has read `length` tokens more, or a little before (see
    `shared_places`). Of equal tokenizers these are the windows of `windows`. A window begins with
    the token that ends where the one before it ended.

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
        count = len(windows(texts[0], length))
        places = shared_places(texts, [number * length for number in range(count + 1)])
        for model, text, at in zip(found, texts, places, strict=True):
            model += [
                Window(text, number, start, stop - start)
                for number, (start, stop) in enumerate(pairwise(at))
            ]
    return found


def shared_places(texts: Sequence[Document], places: Sequence[int]) -> list[list[int]]:
    """Tokens of several tokenizers that end at the same bytes of one text.

    Args:
        texts: the text as each model reads it.
        places: tokens of the first model, ascending.

    Returns:
        For each model a token for each of `places`: the one that ends at the last byte, up to the
        end of the first model's token, where every tokenizer has a border. Where all models read
        the same tokens, these are `places`.

    Raises:
        UserError: a tokenizer that does not know its bytes; too few common borders.
    """
    if read_alike([[text] for text in texts]):
        return [list(places) for _ in texts]
    ends = [text.byte_ends for text in texts if text.byte_ends is not None]
    if len(ends) < len(texts):
        raise UserError(
            f"models with different tokenizers are compared by the bytes of {texts[0].name}, "
            "and one of the tokenizers does not tell them: measure these models one by one"
        )
    cuts = _cuts(texts[0].name, ends, places)
    # Of tokens that share a last byte, the last one ends there.
    return [(torch.searchsorted(end, cuts, right=True) - 1).tolist() for end in ends]


def read_alike(documents: Sequence[Sequence[Document]]) -> bool:
    """Whether the texts are the same tokens for every model."""
    return all(
        torch.equal(text.tokens, texts[0].tokens)
        for texts in zip(*documents, strict=True)
        for text in texts
    )


def _cuts(name: str, ends: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    """Bytes at or before the ends of the first model's tokens, all of them borders of tokens."""
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
