"""A `RecurrentLM`, with or without a mitigation, as `AutoModelForCausalLM` of transformers.

Importing this module registers its classes with transformers (`import longrnn.hf.auto`).

Notable choices:
- The model holds a `RecurrentLM`; its weights have the names there, after `model.`. Checkpoints of
  `longrnn train` and of `save_pretrained` are read by `longrnn.load` and `from_pretrained` alike.
- A mitigation shares the weights and is not a submodule: a state dict has each weight once.
- An argument that a recurrent model cannot follow is refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from longrnn.checksums import remove_checksums
from longrnn.errors import UserError
from longrnn.hf.auto_config import LongRNNConfig
from longrnn.hf.auto_generation import RecurrentGeneration, StateCache, cache_of
from longrnn.hf.auto_inputs import Backbone, check_arguments, labels_without_padding, rows_of
from longrnn.hf.load import load
from longrnn.hf.names import ADAPTER_RECORD, resolve
from longrnn.hf.tokenizer import TOKENIZER_FILES, byte_level
from longrnn.mitigations import mitigation
from longrnn.models.checkpoint import OPTIONS
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.state import LMState

INITIALISED = "_is_hf_initialized"  # the attribute by which transformers knows loaded weights

__all__ = ["LongRNNConfig", "LongRNNForCausalLM", "StateCache"]


# transformers looks for GenerationMixin among the direct base classes.
class LongRNNForCausalLM(RecurrentGeneration, PreTrainedModel, GenerationMixin):  # pyright: ignore
    """A recurrent language model with the interface of Hugging Face.

    Its cache is a `StateCache`, whose `state` is the `LMState` after the consumed tokens. Padding
    (`attention_mask`) never changes a state.

    Args:
        config: a `LongRNNConfig`.

    Raises:
        UserError: options that do not fit together, as for `RecurrentLM`.
    """

    config_class = LongRNNConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embedding"
    # A device_map puts the whole model on one device, where its state lives.
    _no_split_modules = ["RecurrentLM"]  # noqa: RUF012
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012

    # A tuple, because a module would be registered and repeat every weight.
    _mitigated: tuple[str, RecurrentLM] | None = None

    def __init__(self, config: LongRNNConfig) -> None:
        super().__init__(config)
        options = {name: getattr(config, name) for name in OPTIONS}
        self.model = RecurrentLM(RecurrentConfig(**options))
        for weight in self.model.parameters():
            # RecurrentLM has initialised itself, unless it is on the meta device.
            setattr(weight, INITIALISED, not weight.is_meta)
        self._keep_in_fp32_modules_strict = {
            f"mixer.{name}" for mixer in self.model.cells for name in mixer.wide_weights
        }
        self.post_init()
        if self.model.head.weight.is_meta:
            # Until weights are loaded: transformers marks a tied head as initialised, which would
            # hide that the embedding is missing.
            self.model.head.weight = nn.Parameter(torch.empty_like(self.model.head.weight))

    @classmethod
    def of(cls, model: RecurrentLM, *, tokenizer: str = "tokenizer.json") -> LongRNNForCausalLM:
        """A Hugging Face model that shares the weights of a model of `longrnn.load`.

        Args:
            model: a recurrent model, whose mitigation becomes part of the configuration.
            tokenizer: see `LongRNNConfig`.

        Raises:
            UserError: a model whose code is in transformers.
        """
        if not isinstance(model, RecurrentLM):
            raise UserError(
                f"a Hugging Face {model.kind} has a class in transformers already: load its folder "
                "with AutoModelForCausalLM, or evaluate the model of longrnn.load"
            )
        spec = None if model.mitigation is None else model.mitigation.describe()
        plain = model.under(None)
        config = LongRNNConfig(**asdict(plain.config), tokenizer=tokenizer, mitigation=spec)
        if plain.loaded_from is not None and spec == plain.trained_under:
            # From there trainers of TRL load a reference model, and PEFT notes it in an adapter.
            config.name_or_path = plain.loaded_from
        with torch.device("meta"):
            whole = cls(config)
        whole.model = plain
        return whole.train(plain.training)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """See `PreTrainedModel`; an adapter that `longrnn train` wrote is merged, as by `load`.

        PEFT would know neither its mitigation nor the parameters that were trained as a whole.
        """
        # The Auto class gives the name of an adapter there, and its base model as first argument.
        options = kwargs.get("adapter_kwargs") or {}
        adapter = options.get("_adapter_model_path")
        name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        folder = resolve(adapter, options.get("revision")) if adapter else Path(str(name))
        if (folder / ADAPTER_RECORD).is_file():
            dtype = kwargs.get("dtype", kwargs.get("torch_dtype", "auto"))
            dtype = None if dtype == "auto" else dtype
            merged: Any = load(folder, dtype=dtype, device=_device_of(kwargs.get("device_map")))
            return cls.of(merged)
        return super().from_pretrained(*args, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """See `PreTrainedModel`; a model of bytes also gets a tokenizer that transformers reads."""
        folder, is_main = Path(save_directory), kwargs.get("is_main_process", True)
        remove_checksums(folder)
        super().save_pretrained(save_directory, *args, **kwargs)
        has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
        if is_main and self.config.tokenizer == "bytes" and not has_tokenizer:
            byte_level().save(folder)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Gives weights that a checkpoint lacks the values of those of a new `RecurrentLM`."""
        missing = [
            f"{path}.{name}"
            for path, module in self.model.named_modules()
            for name, weight in module.named_parameters(recurse=False)
            if not getattr(module, INITIALISED, getattr(weight, INITIALISED, False))
        ]
        if missing:
            with torch.device("cpu"):
                fresh = RecurrentLM(self.model.config)
            for name in missing:
                self.model.get_parameter(name).copy_(fresh.get_parameter(name))

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """See `PreTrainedModel`; a stored head that differs from the embedding stays untied."""
        super().tie_weights(*args, **kwargs)
        if not self.model.head.weight.is_meta:
            is_tied = self.model.head.weight is self.model.embedding.weight
            self.config.tie_embeddings = self.model.config.tie_embeddings = is_tied

    def get_output_embeddings(self) -> nn.Module:
        """See `PreTrainedModel`."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """See `PreTrainedModel`."""
        self.model.head = new_embeddings  # type: ignore[assignment]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """See `PreTrainedModel`."""
        resized = super().resize_token_embeddings(*args, **kwargs)
        self.config.vocab_size = resized.num_embeddings
        self.model.vocab_size = self.model.config.vocab_size = resized.num_embeddings
        self._mitigated = None  # a copy that has the old size
        return resized

    @property
    def base_model(self) -> Any:
        """The model without its head, as libraries call it that compute the loss themselves."""
        return Backbone(self)

    @property
    def language_model(self) -> RecurrentLM:
        """The `longrnn` model that computes: `model`, under `config.mitigation` if there is one."""
        spec, plain = self.config.mitigation, self.model
        if spec is None:
            return plain
        known = self._mitigated
        # A replica of DataParallel has the attributes of the model that it was copied from.
        if known is None or known[0] != spec or known[1].embedding is not plain.embedding:
            known = self._mitigated = spec, plain.under(mitigation(spec))
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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Consumes tokens.

        Args:
            input_ids: `(b, t)`.
            attention_mask: `(b, t)`, 0 where a token is padding, anywhere in a row; else 1, or the
                number of the document. Columns before the last t are of tokens consumed earlier.
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
            kwargs: arguments of the loss, and others for packed documents: see `rows_of`.

        Raises:
            UserError: arguments that a recurrent model cannot follow, or weights that are not on
                the device of the tokens.
        """
        check_arguments(kwargs)
        if kwargs.get("output_attentions"):
            raise UserError("a recurrent model has no attentions: leave out output_attentions")
        cache = cache_of(past_key_values, state)
        read = input_ids if inputs_embeds is None else inputs_embeds
        if read is None or (input_ids is not None and inputs_embeds is not None):
            raise UserError("give either input_ids, (batch, time), or inputs_embeds, with a width")
        devices = {*getattr(self, "hf_device_map", {}).values()}
        if len(devices) > 1 or self.model.embedding.weight.is_meta:
            raise UserError(
                "weights of this model are offloaded to the disk or the CPU, where its recurrence "
                "cannot read them: load it without device_map, max_memory and cpu_offload"
            )
        time = read.shape[1]
        model = self.language_model
        before = cache.before(len(read)) or model.init_state(len(read))
        is_positioned = model.config.position["kind"] != "none" and cache.pending is None
        is_token, rows = rows_of(
            read, before, is_positioned, attention_mask, position_ids, **kwargs
        )
        if cache.pending is not None:  # of assisted decoding, which has neither of the two
            read = torch.cat([cache.pending, read], 1)
        keep = logits_to_keep if isinstance(logits_to_keep, int) and logits_to_keep else time
        vectors: list[Tensor] | None = None
        if output_hidden_states or self.config.output_hidden_states:
            vectors = []
        kept = min(keep, time) if vectors is None else time
        hidden, after = model.hidden(read, before, keep=kept, rows=rows, observe=vectors)
        logits = model.head(hidden[:, -keep:])
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        loss = None
        if labels is not None or kwargs.get("shift_labels") is not None:
            if logits.shape[1] != time:
                raise UserError("labels need all logits: leave out logits_to_keep")
            if is_token is not None:
                labels, kwargs = labels_without_padding(is_token, labels, kwargs)
            loss = self.loss_function(logits, labels, logits.shape[-1], **kwargs)
        cache.update_state(before, read if is_token is None else read[is_token][None], time, after)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,  # type: ignore[arg-type]
            past_key_values=cache if use_cache else None,
            hidden_states=None if vectors is None else tuple(vectors),  # type: ignore[arg-type]
        )
        return output.to_tuple() if return_dict is False else output


def _device_of(device_map: Any) -> Any:
    """The device on which a `device_map` puts a whole model; None for the CPU."""
    if isinstance(device_map, Mapping):
        device_map = next(iter(device_map.values()))
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return "cuda" if torch.cuda.is_available() else None
    return device_map


AutoConfig.register("longrnn", LongRNNConfig, exist_ok=True)
AutoModelForCausalLM.register(LongRNNConfig, LongRNNForCausalLM, exist_ok=True)
