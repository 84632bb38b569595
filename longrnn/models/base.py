"""The contract of a language model with an explicit state."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from longrnn.state import LMState


class LMOutput(NamedTuple):
    """`logits`: `(b, t, v)`, or fewer rows by `keep`; `state`: after the last token."""

    logits: Tensor
    state: LMState


class LanguageModel(Protocol):
    """Tokens and a state in, logits and a state out; the state given is never changed."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    def init_state(self, batch_size: int) -> LMState:
        """The state before the first token of `batch_size` rows."""
        ...

    def __call__(
        self, tokens: Tensor, state: LMState | None = None, *, keep: int | None = None
    ) -> LMOutput:
        """Consumes tokens.

        Args:
            tokens: `(b, t)` int64; t = 0 is allowed and changes nothing.
            state: of the same batch; None stands for `init_state`.
            keep: logits for the last `keep` tokens only (0 is allowed); None for all of them.
        """
        ...

    def fingerprint(self) -> str:
        """A short hash of configuration and weights: equal if and only if the model is."""
        ...
