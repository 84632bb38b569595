"""Vectors that a `RecurrentLM` reads from outside, and those between its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from longrnn.errors import UserError
from longrnn.models.packing import Arrangement


class Vectors(NamedTuple):
    """What replaces vectors of a call.

    Attributes:
        embeddings: `(b, t, d)`, read instead of the embeddings of the tokens; None for those.
        on_layer: called with a number and the vectors of all tokens, `(b, t, d)`, 0 at padding;
            the model continues with what it returns. Number 0 is the input of the first block, n
            the output of the nth one, and the last is what the head multiplies. A call with it
            reads all tokens as one segment. None to change nothing.
    """

    embeddings: Tensor | None = None
    on_layer: Callable[[int, Tensor], Tensor] | None = None

    def check(self, tokens: Tensor, d_model: int) -> None:
        """Raises a UserError for embeddings of another shape."""
        wanted = (*tokens.shape, d_model)
        if self.embeddings is not None and self.embeddings.shape != wanted:
            raise UserError(
                f"embeddings have shape {tuple(self.embeddings.shape)} and must have {wanted}: "
                "give one vector of the model's width per token"
            )


class ArrangedVectors:
    """`Vectors` of a call whose tokens were moved to the left of their rows.

    Args:
        vectors: as given.
        arranged: the tokens of the call.
        time: number of tokens per row as they were given.

    Attributes:
        source: what the model reads: tokens `(b, t')` int64, or embeddings `(b, t', d)`.
        is_read: whether `on_layer` reads the vectors between layers.
        time: number of tokens per row as they were given.
    """

    def __init__(self, vectors: Vectors, arranged: Arrangement, time: int) -> None:
        given = vectors.embeddings
        self.source = arranged.tokens if given is None else arranged.arrange(given)
        self.is_read = vectors.on_layer is not None
        self.time = time
        self._on_layer, self._arranged = vectors.on_layer, arranged

    def __call__(self, number: int, x: Tensor) -> Tensor:
        """What the next layer reads, `(b, t', d)`."""
        if self._on_layer is None:
            return x
        x = self._arranged.restore(x, self.time)
        return self._arranged.arrange(self._on_layer(number, x))

    def last(self, number: int, x: Tensor) -> Tensor:
        """The same for vectors that were moved back, `(b, t, d)`."""
        return x if self._on_layer is None else self._on_layer(number, x)
