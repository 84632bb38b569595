"""What `LongRNNForCausalLM` makes of its arguments: padding, packed documents and labels."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from longrnn.errors import UserError, nearest
from longrnn.ops.rows import Rows
from longrnn.state import LMState

# How documents are packed.
PACKING = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
# The same, lengths that follow from that, and arguments of the loss.
KNOWN_ARGUMENTS = {
    *PACKING, "max_length_q", "max_length_k",
    "num_items_in_batch", "ignore_index", "shift_labels",
}  # fmt: skip
# Arguments of other models, and what to do instead.
INSTEAD = {
    "output_attentions": "leave it out, as there are none",
    "cache_params": "give the cache as past_key_values",
    "output_router_logits": "leave it out, as the loss of routers is not computed "
    "(router_aux_loss_coef=0 for TRL)",
    "cache_position": "leave it out, as the state knows its position",
    "token_type_ids": "leave it out (return_token_type_ids=False in the tokenizer)",
}


class Backbone:
    """Calls a `LongRNNForCausalLM` for what its head multiplies; other attributes are its model's.

    Args:
        whole: the model with its head.
    """

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def __call__(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        """See `LongRNNForCausalLM.forward`; the result has `last_hidden_state`, `(b, t, d)`."""
        kwargs |= {"output_hidden_states": True, "logits_to_keep": 1}
        # Not `self._whole(…)`: accelerate wraps the instance's `forward` in one autocast context,
        # which stays enabled if it is entered again within itself, as TRL's trainers would do.
        output = type(self._whole).forward(self._whole, *args, **kwargs)
        return BaseModelOutputWithPast(
            last_hidden_state=output.hidden_states[-1], past_key_values=output.past_key_values
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole.model, name)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuses arguments that would have no effect, unless they ask for nothing."""
    asked = {name for name, value in given.items() if value is not None and value is not False}
    for name in sorted(asked - KNOWN_ARGUMENTS):
        parameters = {"input_ids", "attention_mask", "position_ids", "past_key_values", "labels"}
        remedy = INSTEAD.get(name) or nearest(name, KNOWN_ARGUMENTS | parameters)
        raise UserError(f"{name} is not an argument of a recurrent model: {remedy}")


def rows_of(
    read: Tensor,
    state: LMState,
    is_positioned: bool,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    **packing: Any,
) -> tuple[Tensor | None, Rows | None]:
    """Which tokens are padding and where documents begin, by all arguments that state it.

    These are what the collators of transformers and TRL give, together or alone.

    Args:
        read: tokens `(b, t)`, or vectors `(b, t, d)`.
        state: before them.
        is_positioned: whether the model computes with positions.
        attention_mask: `(b, past + t)`: 0 at padding, 1 at a token.
        position_ids: `(b, t)` or `(1, t)`: 0 at the first token of a document, one more at each
            further one. A row whose first position is above 0 continues the state.
        packing: `seq_idx`, the number of the document of each token, like position_ids;
            `cu_seq_lens_q` and `cu_seq_lens_k`, where the documents of one row begin, and the end.

    Returns:
        `(b, t)` bool, false at padding, and the rows for the model; None where nothing is special.

    Raises:
        UserError: an argument of another shape or with other values, or two that disagree.
    """
    packing = {name: packing[name] for name in PACKING if packing.get(name) is not None}
    if attention_mask is None and position_ids is None and not packing:
        return None, None  # also because torch.export reads no values
    shape = read.shape[:2]
    is_token = torch.ones(shape, dtype=torch.bool, device=read.device)
    if attention_mask is not None:
        mask = attention_mask[:, -shape[1] :]
        fits = attention_mask.ndim == 2 and mask.shape == shape
        if not fits or bool((mask != mask.bool()).any()):
            raise UserError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, and {tuple(shape)} "
                "tokens were given: give one row per sequence and one column per token, 0 for "
                "padding and 1 for a token, and position_ids for packed documents"
            )
        is_token = mask.bool()
    starts = torch.zeros_like(is_token)
    before = _previous_token(is_token)
    borders: dict[str, Tensor] = {}  # true at the first token of a document after the first
    if position_ids is not None:
        positions = _by_token("position_ids", position_ids, shape)
        first = state.position[:, None] if is_positioned else positions
        last = positions.gather(1, before.clamp(min=0))
        is_next = positions == torch.where(before < 0, first, last + 1)
        starts = is_token & (positions == 0)
        if bool((is_token & ~starts & ~(is_next & (positions > 0))).any()):
            raise UserError(
                "position_ids must restart at 0 with each document, grow by 1 within it, and go "
                f"on where the state ended, and are {reprlib.repr(position_ids.tolist())}: give "
                "such positions, or leave them out"
            )
        borders["position_ids"] = starts & (before >= 0)
    for name, given in packing.items():
        numbers = given if name == "seq_idx" else _numbered(name, given, read)
        numbers = _by_token(name, numbers, shape)
        changes = numbers != numbers.gather(1, before.clamp(min=0))
        borders[name] = is_token & (before >= 0) & changes
    for name, border in borders.items():
        other = next(iter(borders))
        if not torch.equal(border, borders[other]):
            raise UserError(
                f"{other} and {name} disagree about where documents begin: give one of them"
            )
        starts = starts | border
    padded = None if bool(is_token.all()) else is_token
    return padded, None if padded is None and not bool(starts.any()) else Rows(padded, starts)


def _numbered(name: str, given: Tensor, read: Tensor) -> Tensor:
    """`(1, t)`: the number of the document of each token, from where documents begin and end."""
    offsets, time = given.flatten().tolist(), read.shape[1]
    ends = [len(read), *offsets[:1], *offsets[-1:]]
    if offsets != sorted(offsets) or ends != [1, 0, time]:
        raise UserError(
            f"{name} is {reprlib.repr(offsets)}, and {tuple(read.shape[:2])} tokens were given: "
            "give one row, the first token of each document, and the number of tokens"
        )
    columns = torch.arange(time, device=read.device)
    return torch.bucketize(columns, given.flatten().to(columns), right=True)[None]


def _previous_token(is_token: Tensor) -> Tensor:
    """`(b, t)` int64: the column of the token before each one in its row; −1 for none."""
    columns = torch.arange(is_token.shape[1], device=is_token.device).expand_as(is_token)
    last = columns.masked_fill(~is_token, -1).cummax(1).values
    return nn.functional.pad(last[:, :-1], (1, 0), value=-1)


def _by_token(name: str, values: Tensor, shape: torch.Size) -> Tensor:
    """Values `(b, t)` from those of all rows or of one; a UserError for another shape."""
    if values.shape not in (shape, (1, shape[1])):
        raise UserError(
            f"{name} has shape {tuple(values.shape)}, and {tuple(shape)} tokens were given: give "
            "one value per token"
        )
    return values.expand(shape)


def predicted_labels(
    is_token: Tensor, labels: Tensor | None, arguments: Mapping[str, Any]
) -> Tensor:
    """The label that each token predicts, `(b, t)`; `ignore_index` at padding.

    Args:
        is_token: `(b, t)` bool, false at padding.
        labels: `(b, t)`, of the tokens themselves; None if `arguments` has `shift_labels`.
        arguments: of the loss.
    """
    ignored, predicted = arguments.get("ignore_index", -100), arguments.get("shift_labels")
    if predicted is None:
        assert labels is not None
        predicted = nn.functional.pad(labels[:, 1:], (0, 1), value=ignored)
    return predicted.masked_fill(~is_token, ignored)
