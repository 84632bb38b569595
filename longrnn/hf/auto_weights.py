"""What transformers needs of a `RecurrentLM` around its computation: configuration and weights."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from longrnn.checksums import remove_checksums, write_checksums
from longrnn.hf.load import load
from longrnn.hf.names import ADAPTER_RECORD, resolve
from longrnn.hf.tokenizer import TOKENIZER_FILES, byte_level
from longrnn.models.checkpoint import FORMAT, OPTIONS
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM

INITIALISED = "_is_hf_initialized"  # the attribute by which transformers knows loaded weights


class LongRNNConfig(PreTrainedConfig, RecurrentConfig):
    """The content of the `config.json` of a checkpoint of longrnn, as transformers reads it.

    The options are those of `RecurrentConfig`, and these:

    Attributes:
        tokenizer: `bytes`, or the path of a tokenizer, relative to the checkpoint.
        format: version of the checkpoint format.
        mitigation: the spec of a mitigation, such as `sliding_window(window=512)`; None for none.
        use_cache: whether the model returns its state in eval mode.
        num_attention_heads: there are none; PEFT divides the width by their number.
    """

    model_type: ClassVar[str] = "longrnn"
    auto_map: ClassVar[dict[str, str]] = {}  # TRL reads it
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "tie_word_embeddings": "tie_embeddings",
    }

    architectures: list[str] | None = field(default_factory=lambda: ["LongRNNForCausalLM"])
    tokenizer: str = "tokenizer.json"
    format: int = FORMAT
    mitigation: str | None = None
    use_cache: bool = True
    num_attention_heads: int = 1
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @property
    def recurrent(self) -> RecurrentConfig:
        """The configuration of the `RecurrentLM`."""
        return RecurrentConfig(**{name: getattr(self, name) for name in OPTIONS})


class LongRNNPreTrainedModel(PreTrainedModel):
    """A `PreTrainedModel` that holds a `RecurrentLM`.

    Args:
        config: a `LongRNNConfig`.

    Attributes:
        model: the `RecurrentLM`.

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

    def __init__(self, config: LongRNNConfig) -> None:
        super().__init__(config)
        self.model = RecurrentLM(config.recurrent)
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
            whole: Any = cls
            return whole.of(load(folder, dtype=kwargs.get("dtype")))
        return super().from_pretrained(*args, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """See `PreTrainedModel`; a model of bytes also gets a tokenizer that transformers reads."""
        folder, is_main = Path(save_directory), kwargs.get("is_main_process", True)
        if is_main:
            remove_checksums(folder)
        super().save_pretrained(save_directory, *args, **kwargs)
        if not is_main:
            return
        has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
        if self.config.tokenizer == "bytes" and not has_tokenizer:
            byte_level().save(folder)
        write_checksums(folder)

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
        return resized
