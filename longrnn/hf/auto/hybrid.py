"""A `HybridLM` as a Hugging Face model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from longrnn.checksums import remove_checksums
from longrnn.errors import UserError
from longrnn.hf.auto.forward import RecurrentForward
from longrnn.hf.auto.generation import RecurrentGeneration
from longrnn.hf.foreign import MITIGATION_KEY
from longrnn.hf.foreign_load import quietly
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.programs import reason_of


class HybridForCausalLM(RecurrentForward, RecurrentGeneration, GenerationMixin):  # pyright: ignore
    """A hybrid with the interface of `LongRNNForCausalLM`: padding, packed documents, states.

    It has the modules, the configuration and the other attributes of the Hugging Face model that
    the hybrid holds, so that weights, adapters and checkpoints have their names there.

    Args:
        model: a `HybridLM`, with its mitigation and its window of attention.
    """

    def __init__(self, model: Any) -> None:
        vars(self).update(vars(model.model))
        vars(self).pop("forward", None)
        # In a tuple, because a module would be registered.
        self._hybrid = (model,)
        self._tied_weights_keys = type(model.model)._tied_weights_keys
        cap = FAMILIES[self.config.model_type].soft_cap
        if cap is not None:  # the name by which TRL reads it, for its own loss
            kind = type(self.config)
            kind.attribute_map = {**kind.attribute_map, "final_logit_softcapping": cap}

    @property
    def language_model(self) -> Any:  # pyright: ignore
        """The `HybridLM`."""
        return self._hybrid[0]

    def get_input_embeddings(self) -> nn.Module:  # pyright: ignore
        """See `PreTrainedModel`."""
        return self.language_model.model.get_input_embeddings()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """See `PreTrainedModel`."""
        resized = super().resize_token_embeddings(*args, **kwargs)
        self.language_model.vocab_size = resized.num_embeddings
        return resized

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Makes the backward pass compute each layer again."""
        self.language_model.gradient_checkpointing_enable()

    def gradient_checkpointing_disable(self) -> None:
        """Keeps the activations of all layers."""
        self.language_model.gradient_checkpointing_enable(False)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """See `nn.Module`; the weights may also have the names and shapes of a checkpoint.

        The Trainer of Hugging Face reads them so from its checkpoints.

        Raises:
            UserError: such weights are incomplete, as those of one shard are.
        """
        if not state_dict.keys() <= self.state_dict().keys():
            state_dict = self._converted(state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def _converted(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """Weights of this model, from those of a whole checkpoint."""
        inner: Any = self.language_model.model
        options = {"config": inner.config, "state_dict": dict(weights), "output_loading_info": True}
        # In a wide dtype, from which each weight is rounded once.
        options["dtype"] = torch.promote_types(self.dtype, torch.float32)
        try:
            with quietly():
                read, report = type(inner).from_pretrained(None, **options)
            for name in sorted({*report["missing_keys"], *report["unexpected_keys"]}):
                raise ValueError(name)
            return read.state_dict()
        except (RuntimeError, ValueError) as error:  # RuntimeError: experts in several files
            raise UserError(
                f"these weights are not a whole checkpoint of this {inner.config.model_type} "
                f"({reason_of(error)}): give all weights of its files at once, or open its folder "
                "with from_pretrained"
            ) from error

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Writes a checkpoint of the model's own architecture, which records the mitigation."""
        setattr(self.config, MITIGATION_KEY, self.language_model.spec)
        remove_checksums(Path(save_directory))
        self.language_model.model.save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            self.save_start(Path(save_directory))
