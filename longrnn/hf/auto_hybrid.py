"""A `HybridLM` as a Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from longrnn.checksums import remove_checksums
from longrnn.hf.auto_forward import RecurrentForward
from longrnn.hf.auto_generation import RecurrentGeneration
from longrnn.hf.foreign import MITIGATION_KEY


class HybridForCausalLM(  # pyright: ignore
    RecurrentForward, RecurrentGeneration, PreTrainedModel, GenerationMixin
):
    """A hybrid with the interface of `LongRNNForCausalLM`: padding, packed documents, states.

    It has the modules, the configuration and the other attributes of the Hugging Face model that
    the hybrid holds, so that weights, adapters and checkpoints have their names there.

    Args:
        model: a `HybridLM`, with its mitigation and its window of attention.
    """

    supports_gradient_checkpointing = True

    def __init__(self, model: Any) -> None:
        vars(self).update(vars(model.model))
        vars(self).pop("forward", None)
        # In a tuple, because a module would be registered.
        self._hybrid = (model,)

    @property
    def language_model(self) -> Any:  # pyright: ignore
        """The `HybridLM`."""
        return self._hybrid[0]

    def get_input_embeddings(self) -> nn.Module:  # pyright: ignore
        """See `PreTrainedModel`."""
        return self.language_model.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """See `PreTrainedModel`."""
        return self.language_model.head

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.language_model._apply(fn, recurse)  # which has the same modules
        return self

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Makes the backward pass compute each layer again."""
        self.language_model.gradient_checkpointing_enable()

    def gradient_checkpointing_disable(self) -> None:
        """Keeps the activations of all layers."""
        self.language_model.gradient_checkpointing_enable(False)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Writes a checkpoint of the model's own architecture, which records the mitigation."""
        setattr(self.config, MITIGATION_KEY, self.language_model.spec)
        remove_checksums(Path(save_directory))
        self.language_model.model.save_pretrained(save_directory, *args, **kwargs)
