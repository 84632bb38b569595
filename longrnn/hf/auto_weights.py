"""What transformers needs of a `RecurrentLM` around its computation: configuration and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file

from longrnn.checksums import remove_checksums, write_checksums
from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.files import read_json
from longrnn.hf.names import ADAPTER, ADAPTER_RECORD
from longrnn.hf.tokenizer import TOKENIZER_FILES, byte_level
from longrnn.mitigations import mitigation
from longrnn.models.checkpoint import FORMAT, OPTIONS
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM

INITIALISED = "_is_hf_initialized"  # the attribute by which transformers knows loaded weights


@strict
class LongRNNConfig(PreTrainedConfig):
    """The content of the `config.json` of a checkpoint of longrnn, as transformers reads it.

    The options are those of `RecurrentConfig`, and these:

    Attributes:
        tokenizer: `bytes`, or the path of a tokenizer, relative to the checkpoint.
        format: version of the checkpoint format.
        mitigation: what `longrnn.mitigation` takes as text or mapping; None for none.
        use_cache: whether the model returns its state in eval mode.
    """

    model_type: ClassVar[str] = "longrnn"
    auto_map: ClassVar[dict[str, str]] = {}  # TRL reads it
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "tie_word_embeddings": "tie_embeddings",
    }

    vocab_size: int = 256
    d_model: int = 128
    n_layers: int = 2
    mixer: dict[str, Any] | None = None
    position: dict[str, Any] | None = None
    block: str = "residual"
    tie_embeddings: bool = True
    norm_eps: float = 1e-5
    residual_in_fp32: bool = False
    tokenizer: str = "tokenizer.json"
    format: int = FORMAT
    mitigation: str | dict[str, Any] | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name, value in asdict(self.recurrent).items():
            setattr(self, name, value)
        self.architectures = self.architectures or ["LongRNNForCausalLM"]

    def to_dict(self) -> dict[str, Any]:
        """See `PreTrainedConfig`; with the sizes by the names under which PEFT reads them."""
        under = self.mitigation
        return super().to_dict() | {
            "hidden_size": self.d_model,
            # There are none; PEFT wants their number to divide a width by it.
            "num_attention_heads": 1,
            "mitigation": None if under is None else str(mitigation(under)),
        }

    @property
    def recurrent(self) -> RecurrentConfig:
        """The configuration of the `RecurrentLM`."""
        options = {name: getattr(self, name) for name in OPTIONS}
        given = {name: value for name, value in options.items() if value is not None}
        return build_config(RecurrentConfig, given, source="LongRNNConfig")


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
    _no_split_modules = ["Block"]  # noqa: RUF012
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012
    _has_own_adapter = False
    # A tuple, because a module would be registered and repeat every weight.
    _fresh: tuple[RecurrentLM] | None = None

    def __init__(self, config: LongRNNConfig) -> None:
        super().__init__(config)
        self.model = RecurrentLM(config.recurrent)
        for weight in self.model.parameters():
            # RecurrentLM has initialised itself; on the meta device, `_init_weights` does.
            setattr(weight, INITIALISED, not weight.is_meta)
        self._keep_in_fp32_modules_strict = {
            f"mixer.{name}" for mixer in self.model.cells for name in mixer.wide_weights
        }
        self.post_init()

    def mark_tied_weights_as_initialized(self, *info: Any) -> None:  # pyright: ignore
        """See `PreTrainedModel`, which would take a missing embedding for one that was loaded.

        Until weights are loaded, embedding and head are one parameter, and it marks the head.

        Args:
            info: what was loaded; the first releases of transformers 5 do not give it.
        """
        missing = set(info[0].missing_keys) if info else set()
        tied = self.all_tied_weights_keys.items()
        lost = {source for head, source in tied if {head, source} <= missing}
        super().mark_tied_weights_as_initialized(*info)
        if lost:
            info[0].missing_keys |= lost

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """See `PreTrainedModel`; an adapter brings the mitigation under which it was trained.

        Raises:
            UserError: a device_map of several devices.
        """
        record = _adapter_record(args[0] if args else None, kwargs)
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if record is not None:
            model._has_own_adapter = True
            model.config.mitigation = record.get("mitigation")
        # A cell calls the weights of its projections without the modules whose hooks accelerate
        # would use to move them, and a state lives on one device.
        devices = {str(one) for one in getattr(model, "hf_device_map", {}).values()}
        if len(devices) > 1:
            raise UserError(
                f"the device_map puts the model on {', '.join(sorted(devices))}, and it runs on "
                "one device: give device_map={'': 'cuda:0'}, or a smaller dtype"
            )
        return loaded

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """See `PreTrainedModel`; a model of bytes also gets a tokenizer that transformers reads.

        Raises:
            UserError: an adapter that `longrnn train` wrote is loaded: transformers would save
                neither its mitigation nor the parameters that were trained as a whole.
        """
        if self._has_own_adapter:
            raise UserError(
                "transformers cannot save this adapter completely: copy its folder, or save the "
                "merged model of longrnn.load(folder) with LongRNNForCausalLM.of"
            )
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

    def initialize_weights(self) -> None:
        """See `PreTrainedModel`; the model that `_init_weights` copies from is built once."""
        try:
            super().initialize_weights()
        finally:
            self._fresh = None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialises what a checkpoint lacks as a new `RecurrentLM` does."""
        known = {id(own): name for name, own in self.model.named_modules()}
        missing = {
            name: weight
            for name, weight in module.named_parameters(recurse=False)
            if not getattr(weight, INITIALISED, False)
        }
        if id(module) in known and missing:
            if self._fresh is None:
                with torch.device("cpu"):
                    self._fresh = (RecurrentLM(self.model.config),)
            fresh = self._fresh[0].get_submodule(known[id(module)])
            for name, weight in missing.items():
                weight.copy_(fresh.get_parameter(name))
        elif id(module) not in known and isinstance(module, nn.Embedding | nn.Linear):
            module.weight.normal_(std=self.config.hidden_size**-0.5)  # of another size

    def gradient_checkpointing_enable(  # pyright: ignore
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Computes the activations of blocks again in the backward pass.

        Args:
            gradient_checkpointing_kwargs: of `torch.utils.checkpoint`, whose results are the same
                with all of them; they have no effect.
            every_n_layers: keep the activations of all blocks but each nth one.
            offload: refused.

        Raises:
            UserError: `offload`.
        """
        if offload:
            raise UserError(
                "activations of a recurrent model are not moved to the memory of the host: leave "
                "out offload"
            )
        self.model.gradient_checkpointing_enable("block")
        for number, block in enumerate(self.model.blocks):
            block.recompute = number % every_n_layers == 0  # type: ignore[assignment]

    def gradient_checkpointing_disable(self) -> None:
        """Keeps all activations, as by default."""
        self.model.gradient_checkpointing_disable()

    @property
    def is_activation_checkpointing(self) -> bool:  # pyright: ignore
        """Whether activations are computed again."""
        return self.model.recomputation != "no"

    is_gradient_checkpointing = is_activation_checkpointing  # pyright: ignore

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.model.head = new_embeddings  # type: ignore[assignment]


def _adapter_record(source: Any, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of `adapter.json` for the arguments of `from_pretrained`.

    Args:
        source: the name or folder given to `from_pretrained`.
        options: its keyword arguments; the Auto class puts the name of an adapter there and gives
            the base model as `source`.

    Returns:
        None if no adapter is loaded, or one that longrnn did not write.
    """
    named = (options.get("adapter_kwargs") or {}).get("_adapter_model_path")
    adapter = named or (source if source and (Path(source) / ADAPTER).is_file() else None)
    if adapter is None:
        return None
    path = cached_file(
        adapter,
        ADAPTER_RECORD,
        revision=(options.get("adapter_kwargs") or {}).get("revision"),
        local_files_only=bool(options.get("local_files_only", False)),
        token=options.get("token"),
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else read_json(Path(path))
