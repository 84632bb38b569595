"""The interface of a language model that can be trained."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from longrnn.models.base import LanguageModel
from longrnn.ops.hooks import own_weight
from longrnn.ops.rows import Rows
from longrnn.state import LMState


class TrainableLM(LanguageModel):
    """A language model that `longrnn train` trains.

    Attributes:
        head: the module of the last product, which has a `weight` `(v, d)`.
        blocks: the layers from residual stream to residual stream, the first one first.
        soft_cap: the logits are soft_cap · tanh(product / soft_cap); None for the products.
        trained_under: the spec of the mitigation under which the model was trained; None without.
        base_fingerprint: of the weights before adapters were added.
        base_layout: the layout of the checkpoint that adapters were added to; None for its own.
    """

    head: Any
    blocks: Any
    soft_cap: float | None = None
    trained_under: str | None = None
    base_fingerprint: str = ""
    base_layout: str | None = None

    @property
    def has_positions(self) -> bool:
        """Whether results depend on the positions of tokens."""
        return True

    @property
    def spec(self) -> str | None:
        """The mitigation as `CHECKPOINT+…` takes it; None without."""
        return None if self.mitigation is None else self.mitigation.describe()

    @abstractmethod
    def hidden(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        rows: Rows | None = None,
        observe: list[Tensor] | None = None,
    ) -> tuple[Tensor, LMState]:
        """`forward` without the head: returns the head's input, `(b, t, d)`, and the state.

        For losses that do not hold all logits at once (`longrnn.ops.loss`).

        Args:
            tokens: `(b, t)` integers, or embeddings `(b, t, d)` in their place.
            state: see `forward`.
            keep: see `forward`.
            rows: see `forward`.
            observe: an empty list, which is filled with the vectors before and after each block of
                the last `keep` tokens, `(b, t, d)`; the last entry is the head's input.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits `(b, t, v)` of what `hidden` returns."""
        logits = self.head(hidden)  # the module, which may have an adapter
        return logits if self.soft_cap is None else self.soft_cap * (logits / self.soft_cap).tanh()

    def logit_factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """X and W of the logits X Wᵀ, for losses that do not hold all logits at once.

        Args:
            hidden: the head's input, `(…, d)`.

        Returns:
            `(…, d)` and `(v, d)`. Where the head has a bias, X has a further column of ones and W
            that of the bias.
        """
        weight, bias = own_weight(self.head), getattr(self.head, "bias", None)
        if bias is None:
            return hidden, weight
        ones = hidden.new_ones(*hidden.shape[:-1], 1)
        return torch.cat([hidden, ones], dim=-1), torch.cat([weight, bias[:, None]], dim=1)

    @abstractmethod
    def gradient_checkpointing_enable(self, enabled: bool = True) -> None:
        """Keeps the input of each block alone, which the backward pass computes again."""
