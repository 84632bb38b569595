"""`LongRNNForCausalLM`: a `RecurrentLM`, with or without a mitigation, as a Hugging Face model.

Notable choices:
- The model holds a `RecurrentLM`; its weights have the names there, after `model.`. Checkpoints of
  `longrnn train` and of `save_pretrained` are read by `longrnn.load` and `from_pretrained` alike.
- A mitigation shares the weights and is not a submodule: a state dict has each weight once.
- An argument that a recurrent model cannot follow is refused, not ignored.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from longrnn.checksums import remove_checksums, write_checksums
from longrnn.errors import UserError
from longrnn.hf.auto.adapters import adapter_record, refuse_to_save
from longrnn.hf.auto.arguments import (
    LOSS,
    Backbone,
    after_padding,
    block_outputs,
    cache_of,
    check_arguments,
    check_devices,
    check_inputs,
    hidden_state,
    joined,
)
from longrnn.hf.auto.cache import StateCache
from longrnn.hf.auto.config import LongRNNConfig
from longrnn.hf.auto.generation import StateGeneration
from longrnn.hf.auto.masks import padding, starts
from longrnn.hf.auto.pretrained import LongRNNPreTrainedModel
from longrnn.hf.tokenizer import TOKENIZER_FILES, byte_level
from longrnn.mitigations import mitigation
from longrnn.models.recurrent import RecurrentLM
from longrnn.ops.rows import Rows
from longrnn.state import LMState


# transformers looks for GenerationMixin among the direct base classes.
class LongRNNForCausalLM(  # pyright: ignore
    LongRNNPreTrainedModel, StateGeneration, GenerationMixin
):
    """A recurrent language model with the interface of Hugging Face.

    Its cache is a `StateCache`, whose `state` is the `LMState` after the consumed tokens. Padding
    (`attention_mask`) never changes a state.

    Args:
        config: a `LongRNNConfig`.

    Raises:
        UserError: options that do not fit together, as for `RecurrentLM`.
    """

    def __init__(self, config: LongRNNConfig) -> None:
        super().__init__(config)
        # In a tuple, because a module would be registered and repeat every weight.
        self._mitigated: tuple[str, RecurrentLM] | None = None
        self._has_own_adapter = False
        self.post_init()

    @property
    def base_model(self) -> Any:
        """The model without its head, as libraries call it that compute the loss themselves."""
        return Backbone(self)

    @classmethod
    def of(cls, model: RecurrentLM, *, tokenizer: str = "tokenizer.json") -> LongRNNForCausalLM:
        """A Hugging Face model that shares the weights of a model of `longrnn.load`.

        Args:
            model: a recurrent model, whose mitigation becomes part of the configuration.
            tokenizer: see `LongRNNConfig`.

        Raises:
            UserError: a model of another kind, which transformers has classes for.
        """
        if not isinstance(model, RecurrentLM):
            raise UserError(
                f"{type(model).__name__} is not a recurrent model of longrnn: use the "
                "AutoModelForCausalLM of its own type"
            )
        spec = None if model.mitigation is None else model.mitigation.describe()
        plain = model.under(None)
        config = LongRNNConfig(config=asdict(plain.config), tokenizer=tokenizer, mitigation=spec)
        if plain.loaded_from is not None and spec == plain.trained_under:
            # From there trainers of TRL load a reference model, and PEFT notes it in an adapter.
            config.name_or_path = plain.loaded_from
        with torch.device("meta"):
            whole = cls(config)
        whole.model = plain
        whole.generation_config = GenerationConfig.from_model_config(config)
        return whole.train(plain.training)

    @property
    def language_model(self) -> RecurrentLM:
        """The `longrnn` model that computes: `model`, under `config.mitigation` if there is one."""
        spec = self.config.mitigation
        if spec is None:
            return self.model
        # A replica of DataParallel has the attributes of the model that it was copied from.
        known = self._mitigated
        own = self.model
        if known is None or known[0] != str(spec) or known[1]._modules is not own._modules:
            known = self._mitigated = str(spec), own.under(mitigation(spec))
        return known[1]

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
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Consumes tokens.

        Args:
            input_ids: `(b, t)`.
            attention_mask: `(b, t)`, 0 where a token is padding, anywhere in a row; columns before
                the last t, of tokens consumed earlier, are ignored.
            position_ids: `(b, t)`; without attention_mask, a 0 marks the first token of a document
                that is packed into the row, and the state before it is the zero state.
            past_key_values: the cache of an earlier call, which is changed.
            inputs_embeds: `(b, t, d)`, instead of input_ids.
            labels: `(b, t)`; they are shifted here. −100 is not scored, nor is a token after
                padding, which no token predicts.
            use_cache: whether to return a cache; by default `config.use_cache` in eval mode.
            output_hidden_states: whether to return the output of the embedding and of every block.
            return_dict: False for a tuple.
            logits_to_keep: return logits for the last tokens only; 0 for all; or indices.
            state: the state before the first token, instead of a cache; it is not changed.
            cu_seq_lens_q: `(documents + 1,)`, where the packed documents of a single row begin and
                end, instead of position_ids.
            kwargs: arguments of the loss.

        Raises:
            UserError: arguments that a recurrent model cannot follow.
        """
        check_arguments(kwargs)
        cache = cache_of(past_key_values, state)
        tokens = check_inputs(input_ids, inputs_embeds, cache, self.config.hidden_size)
        is_token = padding(attention_mask, tokens)
        document = starts(position_ids if attention_mask is None else None, cu_seq_lens_q, tokens)
        pending = 0
        if cache.pending is not None:
            before, mask = cache.pending
            pending = before.shape[1]
            is_token = joined(mask, is_token, before, tokens)
            tokens = torch.cat([before, tokens], 1)
            if inputs_embeds is not None:
                inputs_embeds = torch.cat([self.model.embedding(before), inputs_embeds], 1)
        model = self.language_model
        cache.share(len(tokens))
        begin = model.init_state(len(tokens)) if cache.state is None else cache.state
        own = tokens.shape[1] - pending
        keep = logits_to_keep if isinstance(logits_to_keep, int) and logits_to_keep else own
        rows = None if is_token is None and document is None else Rows(is_token, document)
        wanted = bool(self.config.output_hidden_states or output_hidden_states)
        read = tokens if inputs_embeds is None else inputs_embeds
        with block_outputs(model) if wanted else nullcontext([]) as found:
            hidden, after = model.hidden(read, begin, keep=own if wanted else keep, rows=rows)
        logits = model.head(hidden[:, hidden.shape[1] - min(keep, hidden.shape[1]) :])
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        loss = None
        if labels is not None:
            if is_token is not None:
                labels = labels.masked_fill(after_padding(is_token[:, pending:]), -100)
            named = {name: kwargs[name] for name in LOSS if name in kwargs}
            loss = self.loss_function(logits, labels, self.config.vocab_size, **named)
        cache.update_state(begin, tokens, is_token, after)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,  # type: ignore[arg-type]
            past_key_values=cache if use_cache else None,
            hidden_states=(*(hidden_state(one, rows, own) for one in found[:-1]), hidden)
            if wanted
            else None,
        )
        return output.to_tuple() if return_dict is False else output

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """See `PreTrainedModel`."""
        resized = super().resize_token_embeddings(*args, **kwargs)
        self.model.vocab_size = self.model.config.vocab_size = resized.num_embeddings
        self.config.vocab_size = resized.num_embeddings
        return resized

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """See `PreTrainedModel`; an adapter brings the mitigation under which it was trained.

        Raises:
            UserError: a device_map of several devices.
        """
        record = adapter_record(args[0] if args else None, kwargs)
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if record is not None:
            model._has_own_adapter = True
            model.config.mitigation = record.get("mitigation")
        check_devices(model)
        return loaded

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """See `PreTrainedModel`; a model of bytes also gets a tokenizer that transformers reads.

        Raises:
            UserError: an adapter that `longrnn train` wrote is loaded: transformers would save
                neither its mitigation nor the parameters that were trained as a whole.
        """
        refuse_to_save(self._has_own_adapter)
        folder = Path(save_directory)
        main = kwargs.get("is_main_process", True)
        if main:
            remove_checksums(folder)
        super().save_pretrained(save_directory, *args, **kwargs)
        if not main:
            return
        if self.config.tokenizer == "bytes" and not any(
            (folder / name).is_file() for name in TOKENIZER_FILES
        ):
            byte_level().save(folder)
        write_checksums(folder)
