"""What a `PreTrainedModel` knows of its weights: initialisation, recomputation, embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longrnn.errors import UserError
from longrnn.hf.auto.config import LongRNNConfig
from longrnn.models.recurrent import RecurrentLM

INITIALISED = "_is_hf_initialized"  # the attribute by which transformers knows loaded weights


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
    _no_split_modules = ["ResidualBlock", "PlainBlock"]  # noqa: RUF012
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: LongRNNConfig) -> None:
        super().__init__(config)
        self.model = RecurrentLM(config.recurrent)
        for weight in self.model.parameters():
            # RecurrentLM has initialised itself; on the meta device, `_init_weights` does.
            setattr(weight, INITIALISED, not weight.is_meta)
        self._keep_in_fp32_modules_strict = {
            f"mixer.{name}" for mixer in self.model.cells for name in mixer.wide_weights
        }
        # A tuple, because a module would be registered and repeat every weight.
        self._fresh: tuple[RecurrentLM] | None = None

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
