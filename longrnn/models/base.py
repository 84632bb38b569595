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
class CapturableModel(LanguageModel, Protocol):
    """A `LanguageModel` whose calls for generated tokens need not wait for the device."""

    @property
    def is_capturable(self) -> bool:
        """Whether a call for one token with `checked` reads nothing back from the device.

        A CUDA graph can then capture it, with the state in the form of `static_state`.
        """
        ...

    def static_state(self, state: LMState) -> LMState:
        """A state as the tokens in a CUDA graph read and change it, at fixed addresses.

        It belongs to one decoder, shares no memory with `state`, and has the same shapes for every
        state of the same batch. A call with it may change its carry in place.
        """
        ...

    def state_after(self, state: LMState, static: LMState) -> LMState:
        """The state after the tokens that `static`, made from `state`, has consumed since."""
        ...

    def static_tokens(self, state: LMState) -> Tensor | None:
        """How many tokens of each row a CUDA graph may compute, `(b,)` int64; None for any number.

        The next one needs a call with the state itself, which may read the device: it ends a chunk
        of a window, or is past the end of a table of positions, so that the call refuses it.
        """
        ...

    def __call__(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        checked: bool = False,
    ) -> LMOutput:
        """`LanguageModel.__call__`; `checked` leaves out the checks of ids, state and positions."""
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
