"""The call of a recurrent model or a hybrid with the arguments of a Hugging Face model."""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from longrnn.checkpoints.names import INITIAL_STATE
from longrnn.errors import UserError, nearest
from longrnn.hf.auto.generation import StateCache, cache_of
from longrnn.models.trainable import OF_CHECKPOINT, OFFLOADED, TrainableLM
from longrnn.ops.rows import Rows
from longrnn.state import LMState, save

# What collators give beside position_ids, from which it follows.
PACKING = {"seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
OF_LOSS = {"num_items_in_batch", "ignore_index", "shift_labels"}
OF_GENERATE = {"tokenizer"}  # for stop strings, which `generate` hands on
# Arguments of other models, and what to do instead.
INSTEAD = {
    "cache_params": "give past_key_values",
    "output_router_logits": "give router_aux_loss_coef=0 to TRL",
}


class RecurrentForward(PreTrainedModel):
    """A Hugging Face model that computes with a model of longrnn.

    Attributes:
        language_model: the model of longrnn.
    """

    supports_gradient_checkpointing = True
    qconfig = TrainableLM.qconfig
    language_model: Any

    @property
    def base_model(self) -> Any:  # pyright: ignore
        """The model without its head, as libraries call it that compute the loss themselves."""
        return Backbone(self)

    def get_output_embeddings(self) -> nn.Module:
        """See `PreTrainedModel`."""
        return self.language_model.head

    def save_start(self, folder: Path) -> None:
        """Writes the state from which the model starts beside its weights; of none, removes it."""
        start, path = self.language_model.start, folder / INITIAL_STATE
        if start is None:
            path.unlink(missing_ok=True)
        else:
            save(start, path, recorded=OF_CHECKPOINT)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        state: LMState | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Consumes tokens.

        Args:
            input_ids: `(b, t)`.
            attention_mask: `(b, t)`, 0 where a token is padding, anywhere in a row; else 1. Columns
                before the last t are of tokens consumed earlier.
            position_ids: `(b, t)`; a 0 marks the first token of a document that is packed into the
                row, and the state before it is the zero state.
            past_key_values: the cache of an earlier call, which is changed.
            inputs_embeds: `(b, t, d)`, instead of input_ids.
            labels: `(b, t)`; they are shifted here. −100 is not scored, nor is a token after
                padding, which no token predicts.
            use_cache: whether to return a cache; by default `config.use_cache` in eval mode.
            output_hidden_states: whether to return the output of the embedding and of every block.
            return_dict: False for a tuple.
            logits_to_keep: return logits for the last tokens only; 0 for all; or indices.
            state: the state before the first token, instead of a cache; it is not changed.
            kwargs: arguments of the loss, and those that collators give beside position_ids.

        Raises:
            UserError: arguments that a recurrent model cannot follow, or weights that are not on
                the device of the tokens.
        """
        check_arguments(kwargs, position_ids)
        cache = cache_of(past_key_values, state)
        read = input_ids if inputs_embeds is None else inputs_embeds
        if read is None or (input_ids is not None and inputs_embeds is not None):
            raise UserError("give either input_ids, (batch, time), or inputs_embeds, with a width")
        devices = {*getattr(self, "hf_device_map", {}).values()}
        if len(devices) > 1 or self.get_input_embeddings().weight.is_meta:
            raise UserError(OFFLOADED)
        time = read.shape[1]
        model = self.language_model
        initial = cache.state_for(len(read)) or model.init_state(len(read))
        is_positioned = model.has_positions and cache.pending is None
        next_position = initial.position if is_positioned else None
        is_token, rows = rows_of(read, next_position, attention_mask, position_ids)
        if cache.pending is not None:  # of assisted decoding, which has neither of the two
            read = torch.cat([cache.pending, read], 1)
        keep = logits_to_keep if isinstance(logits_to_keep, int) and logits_to_keep else time
        vectors: list[Tensor] | None = None
        if output_hidden_states or self.config.output_hidden_states:
            vectors = []
        kept = min(keep, time) if vectors is None else time
        hidden, final = model.hidden(read, initial, keep=kept, rows=rows, observe=vectors)
        logits = model.logits(hidden[:, -keep:])
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        loss = None
        if labels is not None or kwargs.get("shift_labels") is not None:
            if logits.shape[1] != time:
                raise UserError("labels need all logits: leave out logits_to_keep")
            if is_token is not None:
                kwargs["shift_labels"] = predicted_labels(is_token, labels, kwargs)
            loss = self.loss_function(logits, labels, logits.shape[-1], **kwargs)
        cache.update_state(initial, read if is_token is None else read[is_token][None], time, final)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,  # type: ignore[arg-type]
            past_key_values=cache if use_cache else None,
            hidden_states=None if vectors is None else tuple(vectors),  # type: ignore[arg-type]
        )
        return output.to_tuple() if return_dict is False else output


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


def check_arguments(given: Mapping[str, Any], position_ids: Tensor | None) -> None:
    """Refuse arguments that would have no effect, unless they ask for nothing."""
    asked = {name for name, value in given.items() if value is not None and value is not False}
    for name in sorted(asked - PACKING - OF_LOSS - OF_GENERATE):
        parameters = {"input_ids", "attention_mask", "position_ids", "past_key_values", "labels"}
        remedy = INSTEAD.get(name) or nearest(name, PACKING | OF_LOSS | parameters)
        raise UserError(f"{name} is not an argument of a recurrent model: leave it out ({remedy})")
    if position_ids is None and (names := sorted(asked & PACKING)):
        raise UserError(
            f"{' and '.join(names)} cannot be followed without position_ids: give position_ids, "
            "which restart at 0 with each document"
        )


def rows_of(
    read: Tensor,
    next_position: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
) -> tuple[Tensor | None, Rows | None]:
    """Return which tokens are padding and where documents begin.

    Args:
        read: tokens `(b, t)`, or vectors `(b, t, d)`.
        next_position: `(b,)`, the position at which each row goes on; None for any.
        attention_mask: `(b, past + t)`: 0 at padding, 1 at a token.
        position_ids: `(b, t)` or `(1, t)`: 0 at the first token of a document, one more at each
            further one. A row whose first position is above 0 continues the state.

    Returns:
        `(b, t)` bool, false at padding, and the rows for the model; None where nothing is special.

    Raises:
        UserError: an argument of another shape or with other values.
    """
    if attention_mask is None and position_ids is None:
        return None, None  # also because torch.export reads no values
    shape = read.shape[:2]
    is_token = torch.ones(shape, dtype=torch.bool, device=read.device)
    if attention_mask is not None:
        is_token = _token_mask(attention_mask, shape)
    padded = None if bool(is_token.all()) else is_token
    if position_ids is None:
        return padded, None if padded is None else Rows(padded)
    if position_ids.shape not in (shape, (1, shape[1])):
        raise UserError(
            f"position_ids has shape {tuple(position_ids.shape)}, and {tuple(shape)} tokens "
            "were given: give one value per token"
        )
    positions = position_ids.expand(shape)
    rows = Rows(is_token, is_token & (positions == 0))
    given = rows.arrange(positions)
    if next_position is None:
        next_position = given[:, :1].sum(1).clamp(min=0)  # that of its first token, if it has one
    if bool((given != rows.positions(next_position)[0])[~rows.is_padding].any()):
        raise UserError(
            "position_ids must restart at 0 with each document, grow by 1 within it, and go "
            f"on where the state ended, and are {reprlib.repr(positions.tolist())}: give "
            "such positions, or leave them out"
        )
    return padded, rows if padded is not None or rows.has_starts else None


def _token_mask(attention_mask: Tensor, shape: torch.Size) -> Tensor:
    """Return `(b, t)` bool, false at padding."""
    mask = attention_mask[:, -shape[1] :]
    fits = attention_mask.ndim == 2 and mask.shape == shape
    if not fits or bool((mask != mask.bool()).any()):
        raise UserError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, and {tuple(shape)} "
            "tokens were given: give one row per sequence and one column per token, 0 for "
            "padding and 1 for a token, and position_ids for packed documents"
        )
    return mask.bool()


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
