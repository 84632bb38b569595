"""The interface of a language model with an explicit state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from longrnn.mixers import Edit, Mixer
from longrnn.state import LMState, PyTree


class LMOutput(NamedTuple):
    """`logits`: `(b, t, v)`, or the last `keep` tokens only; `state`: after the last token."""

    logits: Tensor
    state: LMState


class LanguageModel(Protocol):
    """Maps tokens and a state to logits and a state, and never changes the given state."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def max_length(self) -> int | None:
        """How many tokens a sequence may have; None for any number."""
        ...

    def init_state(self, batch_size: int) -> LMState:
        """The state before the first token of `batch_size` rows."""
        ...

    def __call__(
        self, tokens: Tensor, state: LMState | None = None, *, keep: int | None = None
    ) -> LMOutput:
        """Consumes tokens.

        Args:
            tokens: `(b, t)` integers, b >= 1; t = 0 is allowed and changes nothing.
            state: of the same batch; None for `init_state`.
            keep: return logits for the last `keep` tokens only (0 is allowed); None for all.

        `RecurrentLM` and `Mitigated` also take padded and packed rows, with the keyword arguments
        `is_token` and `is_document_start` (see `RecurrentLM.forward`); an implementation that
        cannot refuses them with a `UserError`.
        """
        ...

    def fingerprint(self) -> str:
        """A short hash of configuration and weights; equal hashes mean equal models."""
        ...


@runtime_checkable
class LossModel(LanguageModel, Protocol):
    """A `LanguageModel` that computes losses without a tensor of all logits."""

    def token_losses(
        self, tokens: Tensor, targets: Tensor, state: LMState | None = None
    ) -> tuple[Tensor, LMState]:
        """The loss of each token, without gradients.

        Args:
            tokens: `(b, t)` integers.
            targets: `(b, t)` int64, the token after each; the loss is 0 where they are negative.
            state: of the same batch; None for `init_state`.

        Returns:
            Losses in nats, `(b, t)` float32 or wider, computed from logits that are not rounded to
            the dtype of the weights; and the state after the last token.
        """
        ...


@runtime_checkable
class EditableModel(LanguageModel, Protocol):
    """A `LanguageModel` whose recurrent layers can be edited and read.

    `RecurrentLM` is one, and so is a Hugging Face model whose Mamba-2 layers run on the cells of
    longrnn. "Layer" means a recurrent layer here; others, such as attention, are not counted.
    """

    @property
    def mixers(self) -> list[Mixer]:
        """The cell of each layer, first layer first."""
        ...

    @property
    def mixer_kind(self) -> str:
        """The kind of the cells in the registry of mixers."""
        ...

    def mixer_states(self, state: LMState) -> list[PyTree]:
        """The state of the cell of each layer."""
        ...

    def init_state(self, batch_size: int, edits: Sequence[Edit] | None = None) -> LMState:
        """The state before the first token; with edits, `extra` holds one carry per layer."""
        ...

    def __call__(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        edits: Sequence[Edit] | None = None,
        is_token: Tensor | None = None,
        is_document_start: Tensor | None = None,
    ) -> LMOutput:
        """`LanguageModel.__call__` with one edit per layer; see `RecurrentLM.forward`."""
        ...

    def token_losses(
        self,
        tokens: Tensor,
        targets: Tensor,
        state: LMState | None = None,
        *,
        edits: Sequence[Edit] | None = None,
    ) -> tuple[Tensor, LMState]:
        """`LossModel.token_losses` with one edit per layer."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights."""
        ...

    def buffers(self) -> Iterator[Tensor]:
        """Tensors that belong to the model and are not trained."""
        ...


def fingerprint(config: Mapping[str, Any], weights: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of the SHA-256 of a configuration and of weights."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    # Transforms of torch.func wrap the weights, and wrapped tensors have no bytes to read.
    with torch._C._DisableFuncTorch():
        for name, weight in sorted(weights.items()):
            tensor: Any = torch.func.debug_unwrap(weight).detach()
            raw = tensor.cpu().contiguous().flatten().view(torch.uint8)
            digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(raw.numpy())
    return digest.hexdigest()[:16]
