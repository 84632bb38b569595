"""What `LongRNNForCausalLM` makes of its arguments: masks of padding, documents, hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longrnn.errors import UserError, nearest
from longrnn.hf.auto_cache import StateCache
from longrnn.hf.packing import document_starts, document_starts_of_positions
from longrnn.models.recurrent import RecurrentLM
from longrnn.ops.rows import Rows
from longrnn.state import LMState

# Arguments of the loss, and what collators add for kernels of attention.
LOSS = ("num_items_in_batch", "ignore_index", "shift_labels")
UNUSED = ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "output_attentions")


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuses arguments that would have no effect."""
    if kwargs.get("output_attentions"):
        raise UserError("a recurrent model has no attentions: leave out output_attentions")
    for name in kwargs:
        if name not in LOSS + UNUSED:
            raise UserError(f"unknown argument {name}: {nearest(name, (*LOSS, 'input_ids'))}")


def cache_of(given: Any, state: LMState | None) -> StateCache:
    """The cache of a call, from a cache or a state; a new one without either.

    Raises:
        UserError: both, or a cache of another kind.
    """
    if given is None:
        return StateCache(state)
    if not isinstance(given, StateCache):
        raise UserError(
            f"past_key_values is a {type(given).__name__}: give the StateCache of an earlier call, "
            "or a state as state="
        )
    if state is not None:
        raise UserError("both past_key_values and state were given: give one of them")
    return given


def joined(
    left: Tensor | None, right: Tensor | None, before: Tensor, tokens: Tensor
) -> Tensor | None:
    """The masks of two stretches of tokens as one; None if there is no padding in either."""
    if left is None and right is None:
        return None
    whole = [
        torch.ones_like(part, dtype=torch.bool) if mask is None else mask
        for mask, part in ((left, before), (right, tokens))
    ]
    return torch.cat(whole, 1)


def after_padding(is_token: Tensor) -> Tensor:
    """`(b, t)` bool, True where the column before is padding."""
    return nn.functional.pad(~is_token[:, :-1], (1, 0))


def check_inputs(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, cache: StateCache, width: int
) -> Tensor:
    """Token ids, `(b, t)`; zeros where embeddings are given instead.

    Raises:
        UserError: neither or both, or embeddings for a cache that records token ids.
    """
    if inputs_embeds is None:
        if input_ids is None:
            raise UserError("input_ids is missing: give the token ids, (batch, time)")
        return input_ids
    if input_ids is not None:
        raise UserError("both input_ids and inputs_embeds were given: give one of them")
    if inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != width:
        raise UserError(
            f"inputs_embeds has shape {tuple(inputs_embeds.shape)}: give one vector per token, "
            f"(batch, time, {width})"
        )
    if cache.is_recording:
        raise UserError(
            "assisted decoding reads rejected tokens again, and inputs_embeds has no ids: give "
            "input_ids"
        )
    shape = inputs_embeds.shape[:2]
    return torch.zeros(shape, dtype=torch.long, device=inputs_embeds.device)


def padding(attention_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """`(b, t)` bool, False where a token is padding; None if there is none.

    Args:
        attention_mask: `(b, past + t)`; None for no padding.
        tokens: `(b, t)`.

    Raises:
        UserError: a mask of another shape.
    """
    if attention_mask is None:
        return None
    rows, time = tokens.shape
    fits = attention_mask.ndim == 2 and len(attention_mask) == rows
    if not fits or attention_mask.shape[1] < time:
        raise UserError(
            f"attention_mask has shape {tuple(attention_mask.shape)} and input_ids "
            f"{tuple(tokens.shape)}: give one row per sequence and one column per token, "
            "1 for a token and 0 for padding"
        )
    mask = attention_mask[:, attention_mask.shape[1] - time :].bool()
    return None if bool(mask.all()) else mask


def starts(
    position_ids: Tensor | None, cu_seq_lens: Tensor | None, tokens: Tensor
) -> Tensor | None:
    """`(b, t)` bool, True at the first token of each packed document; None for one per row.

    Args:
        position_ids: `(b, t)` or `(1, t)`: 0 at the first token of a document, one more at each
            further one.
        cu_seq_lens: `(documents + 1,)`, boundaries of the documents of a single row.
        tokens: `(b, t)`.

    Raises:
        UserError: what `longrnn.hf.packing` refuses, or another number of tokens.
    """
    found = torch.zeros_like(tokens, dtype=torch.bool)
    if position_ids is not None:
        if position_ids.shape[1:] != tokens.shape[1:]:
            raise UserError(
                f"position_ids has shape {tuple(position_ids.shape)} and input_ids "
                f"{tuple(tokens.shape)}: give one position per token"
            )
        found = found | document_starts_of_positions(position_ids)
    if cu_seq_lens is not None:
        if len(tokens) != 1:
            raise UserError(
                f"cu_seq_lens_q divides one row, and input_ids has {len(tokens)}: give position_ids"
            )
        found = found | document_starts(cu_seq_lens, tokens.shape[1])
    # A row of one document continues the given state.
    return found if bool(found[:, 1:].any()) else None


def inferred_padding(mask: Tensor, *, continued: bool) -> Tensor:
    """Return the mask that transformers infers from the id of padding, where it can be right.

    Args:
        mask: `(b, t)`, 0 at every padding id of the input.
        continued: whether rows continue a state.

    Raises:
        UserError: padding ids after other tokens, or in rows that continue a state, where they may
            as well be text.
    """
    leading = mask.cumsum(1) == 0
    if bool(((mask == 0) & ~leading).any()) or (continued and bool((mask == 0).any())):
        where = "rows that continue a state" if continued else "rows, after other tokens"
        raise UserError(
            f"input_ids have the pad_token_id in {where}, and no attention_mask says whether it is "
            "padding: give attention_mask, torch.ones_like(input_ids) if all of it is text"
        )
    return mask


@contextmanager
def block_outputs(model: RecurrentLM) -> Iterator[list[list[Tensor]]]:
    """A context in which the input of the first block and the output of each are kept, by part.

    Args:
        model: is called in the context, and reads a long text in parts.
    """
    found: list[list[Tensor]] = [[] for _ in range(len(model.blocks) + 1)]
    numbers = {block: number for number, block in enumerate(model.blocks)}

    def see(block: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        if numbers[block] == 0:
            found[0].append(args[0])
        found[numbers[block] + 1].append(output[0])

    handles = [block.register_forward_hook(see) for block in model.blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def hidden_state(parts: list[Tensor], rows: Rows | None, own: int) -> Tensor:
    """The vectors between two blocks at the last `own` tokens, `(b, own, d)`.

    Args:
        parts: of `block_outputs`; one part is returned as it is, the tensor that the model computes
            with.
        rows: of the call.
        own: number of tokens.
    """
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if rows is not None:
        return rows.restore(whole[:, rows.first_kept(own) :], own)
    return whole if whole.shape[1] == own else whole[:, whole.shape[1] - own :]
