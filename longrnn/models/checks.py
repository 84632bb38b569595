"""Checks of the arguments of a language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.mixers import Edit
from longrnn.state import History, LMState, PyTree, histories, leaves, same_row

# Dtypes of token ids.
INTEGERS = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)


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
    # Read from the device at once.
    low, high = map(int, torch.stack(tokens.aminmax()).cpu())
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
        raise UserError(
            f"{name} must be bool of shape {tuple(tokens.shape)} like the tokens, not "
            f"{_described(mask)}: give one entry per token, for example attention_mask.bool()"
        )
    return mask.to(tokens.device)


def check_targets(targets: Tensor, tokens: Tensor, vocab_size: int) -> None:
    """Refuses targets that are not one per token.

    Raises:
        UserError: not int64, not of the shape of the tokens, or ids outside the vocabulary.
    """
    is_integer = isinstance(targets, Tensor) and targets.dtype == torch.int64
    if not is_integer or targets.shape != tokens.shape:
        raise UserError(
            f"targets must be int64 of shape {tuple(tokens.shape)} like the tokens, not "
            f"{_described(targets)}: give the id after each token, and -100 where none is scored"
        )
    if targets.numel() and int(targets.max()) >= vocab_size:
        raise UserError(
            f"target {int(targets.max())} is outside the vocabulary of {vocab_size}: use the "
            "tokenizer that this model was trained with"
        )


def _described(given: object) -> str:
    """The dtype and the shape of a tensor, or the type of anything else."""
    if isinstance(given, Tensor):
        return f"{given.dtype} of shape {tuple(given.shape)}"
    return f"a {type(given).__name__}"


def check_is_state(given: object) -> None:
    """Raises a UserError for what is not an `LMState`."""
    if not isinstance(given, LMState):
        raise UserError(
            f"state must be an LMState, not a {type(given).__name__}: give the `state` of the "
            "result of an earlier call, or init_state(batch_size)"
        )


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
    check_is_state(state)
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
