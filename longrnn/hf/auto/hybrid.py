"""A `HybridLM` as a Hugging Face model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationMixin

from longrnn.checksums import remove_checksums
from longrnn.errors import UserError
from longrnn.hf.auto.forward import RecurrentForward
from longrnn.hf.auto.generation import RecurrentGeneration
from longrnn.hf.foreign import MITIGATION_KEY
from longrnn.hf.hybrid.families import FAMILIES


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

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Makes the backward pass compute each layer again."""
        self.language_model.gradient_checkpointing_enable()

    def gradient_checkpointing_disable(self) -> None:
        """Keeps the activations of all layers."""
        self.language_model.gradient_checkpointing_enable(False)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """See `nn.Module`.

        Raises:
            UserError: weights by the names of a checkpoint, where those of the model differ.
        """
        for name in sorted(state_dict.keys() - self.state_dict().keys()):
            raise UserError(
                f"{name} is not the name of a weight of this {self.config.model_type} in memory: "
                "open the folder of the checkpoint with from_pretrained"
            )
        return super().load_state_dict(state_dict, strict, assign)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Writes a checkpoint of the model's own architecture, which records the mitigation."""
        setattr(self.config, MITIGATION_KEY, self.language_model.spec)
        remove_checksums(Path(save_directory))
        self.language_model.model.save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            self.save_start(Path(save_directory))
