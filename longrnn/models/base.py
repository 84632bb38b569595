"""The interface of a language model with an explicit state, and checks of its arguments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from longrnn.errors import UserError
from longrnn.mixers import Edit, Mixer
from longrnn.state import History, LMState, PyTree, histories, leaves, same_row

# Dtypes of token ids.
INTEGERS = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)


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

        A CUDA graph can then capture it.
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
        """`LanguageModel.__call__`; `checked` leaves out the checks of ids and state."""
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


def check_tokens(tokens: Tensor, vocab_size: int, is_token: Tensor | None = None) -> Tensor:
    """Returns token ids as int64, from any integer dtype.

    Args:
        tokens: `(b, t)` integers.
        vocab_size: number of token ids.
        is_token: `(b, t)` bool, false at padding, where any id may stand and 0 is returned.

    Raises:
        UserError: not integers of shape `(b, t)` with b >= 1, ids outside the vocabulary, or a mask
            of another shape or dtype.
    """
    if not isinstance(tokens, Tensor):
        raise UserError(
            f"tokens must be a tensor of ids, not a {type(tokens).__name__}: "
            "give torch.tensor(ids), one row per sequence"
        )
    if tokens.dtype not in INTEGERS:
        raise UserError(f"tokens must be integers, not {tokens.dtype}: give the ids as torch.long")
    if tokens.ndim != 2:
        raise UserError(
            f"tokens must have shape (batch, time), not {tuple(tokens.shape)}: "
            "give one row per sequence"
        )
    if len(tokens) == 0:
        raise UserError("the batch has no rows: give at least one sequence")
    tokens = tokens.long()
    if is_token is not None:
        tokens = tokens.masked_fill(~check_mask("is_token", is_token, tokens), 0)
    if tokens.numel() == 0:
        return tokens
    low, high = (int(bound) for bound in tokens.aminmax())
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}: "
            "use the tokenizer that this model was trained with"
        )
    return tokens


def check_mask(name: str, mask: Tensor, tokens: Tensor) -> Tensor:
    """Returns a mask of tokens on their device.

    Raises:
        UserError: not bool, or not of the shape of the tokens.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != tokens.shape:
        given = (
            f"{mask.dtype} of shape {tuple(mask.shape)}"
            if isinstance(mask, Tensor)
            else f"a {type(mask).__name__}"
        )
        raise UserError(
            f"{name} must be bool of shape {tuple(tokens.shape)} like the tokens, not {given}: "
            "give one entry per token, for example attention_mask.bool()"
        )
    return mask.to(tokens.device)


def check_state(
    state: LMState, like: PyTree, batch_size: int, edits: Sequence[Edit] | None = None
) -> None:
    """Refuses the state of another model, of a mitigated model, or of another batch size.

    Args:
        state: the state to check.
        like: the expected `layers` of one row, without batch axis, on the meta device.
        batch_size: number of rows of the tokens.
        edits: one per layer, whose carries the state has; None without edits.

    Raises:
        UserError: the state does not fit.
    """
    if edits is not None:
        check_state(state._replace(extra=()), like, batch_size)
        if len(state.extra) != len(like):
            raise UserError(
                f"{len(edits)} edits need one carry each and the state has {len(state.extra)}: "
                "start from init_state(batch_size, edits)"
            )
        return
    if state.extra == () and _is_like(
        (state.position, state.layers), (_POSITION, like), batch_size
    ):
        return
    expected, growing = dict(leaves(like)), histories(like)
    given = dict(leaves(state.layers))
    if given.keys() != expected.keys():
        raise UserError("this is the state of another model: start from model.init_state")
    for name, leaf in given.items():
        expected_leaf = expected[name]
        same = same_row(leaf.shape[1:], expected_leaf.shape, name in growing)
        if not same or leaf.dtype != expected_leaf.dtype:
            raise UserError(
                f"this is the state of another model (layers.{name} has shape "
                f"{tuple(leaf.shape[1:])} {leaf.dtype} per row, {tuple(expected_leaf.shape)} "
                f"{expected_leaf.dtype} was expected): start from model.init_state"
            )
    if state.position.ndim != 1 or state.position.dtype != torch.int64:
        raise UserError(
            f"the state's position has shape {tuple(state.position.shape)} {state.position.dtype}, "
            "and one int64 per row was expected: start from model.init_state"
        )
    for leaf in (state.position, *given.values()):
        if len(leaf) != batch_size:
            raise UserError(
                f"the state has {len(leaf)} rows and the tokens have {batch_size}: "
                "use state.take or state.expand to make them equal"
            )
    if not isinstance(state.extra, tuple) or state.extra:
        raise UserError("this state carries a mitigation: give it to the model that made it")


_POSITION = torch.empty((), dtype=torch.int64, device="meta")


def _is_like(given: PyTree, like: PyTree, rows: int) -> bool:
    """Whether a tree has the leaves of `like` with so many rows; false with a `History`, too.

    One pass, because it is made for every token.
    """
    if isinstance(like, Tensor):
        return (
            isinstance(given, Tensor)
            and given.dtype == like.dtype
            and given.shape == (rows, *like.shape)
        )
    if type(given) is not type(like) or isinstance(like, History) or len(given) != len(like):
        return False
    for one, other in zip(given, like, strict=True):  # noqa: SIM110 (`all` takes longer)
        if not _is_like(one, other, rows):
            return False
    return True


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
