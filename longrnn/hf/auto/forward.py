"""The call of a recurrent model or a hybrid with the arguments of a Hugging Face model."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from longrnn.checkpoints.names import INITIAL_STATE
from longrnn.errors import UserError
from longrnn.hf.auto.generation import StateCache, cache_of
from longrnn.hf.auto.inputs import Backbone, check_arguments, predicted_labels, rows_of
from longrnn.models.trainable import OF_CHECKPOINT, OFFLOADED, TrainableLM
from longrnn.state import LMState, save


class RecurrentForward:
    """What comes before `PreTrainedModel` among the bases of a model.

    Attributes:
        language_model: the model of longrnn that computes.
    """

    qconfig = TrainableLM.qconfig
    language_model: Any
    config: Any
    training: bool
    loss_function: Any
    get_input_embeddings: Any

    @property
    def base_model(self) -> Any:
        """The model without its head, as libraries call it that compute the loss themselves."""
        return Backbone(self)

    def save_start(self, folder: Path) -> None:
        """Writes the state from which the model starts, if it has one, beside its weights."""
        start = self.language_model.start
        if start is not None:
            save(start, folder / INITIAL_STATE, recorded=OF_CHECKPOINT)

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
