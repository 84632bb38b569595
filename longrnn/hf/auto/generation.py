"""`generate` of a recurrent model: its cache is a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from longrnn.errors import UserError
from longrnn.hf.auto.arguments import cache_of
from longrnn.hf.auto.masks import inferred_padding


class StateGeneration(GenerationMixin):
    """`GenerationMixin` whose cache is a `StateCache`."""

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *args: Any,
        inputs_embeds: Tensor | None = None,  # transformers looks for it in the signature
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """See `GenerationMixin`; positions are those of the state, and given ones are left out."""
        for name in ("position_ids", "tokenizer"):
            kwargs.pop(name, None)
        inputs = super().prepare_inputs_for_generation(  # pyright: ignore
            input_ids,
            *args,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        if not is_first_iteration and inputs["input_ids"].shape[1] == 1:
            inputs.pop("attention_mask", None)  # a generated token is not padding
        return inputs

    def _prepare_attention_mask_for_generation(  # pyright: ignore
        self, inputs_tensor: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """Infers the padding of a batch without attention_mask, see `inferred_padding`."""
        if generation_config.is_assistant:  # drafts continue text that has no padding
            return torch.ones_like(inputs_tensor)
        inferred = super()._prepare_attention_mask_for_generation(
            inputs_tensor, generation_config, model_kwargs
        )
        return inferred_padding(inferred, continued=model_kwargs.get("state") is not None)

    def _prepare_cache_for_generation(  # pyright: ignore
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Puts a `StateCache` where transformers would put a `DynamicCache`.

        With `use_cache=False` there is none, and each call reads the whole text again.

        Raises:
            UserError: another kind of cache, a cache with `use_cache=False`, or padding after
                which a row cannot be continued.
        """
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise UserError(
                "the attention_mask has padding on the right, and a row is continued after its "
                "last column: set padding_side='left' in the tokenizer"
            )
        if generation_config.cache_implementation is not None:
            raise UserError(
                f"a recurrent model has no {generation_config.cache_implementation} cache: leave "
                "out cache_implementation"
            )
        if generation_config.use_cache is False:
            if model_kwargs.get("past_key_values") is not None:
                raise UserError(
                    "with use_cache=False each call reads all token ids again, and past_key_values "
                    "has read some: leave out one of the two"
                )
            return
        cache = cache_of(model_kwargs.pop("past_key_values", None), model_kwargs.pop("state", None))
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs["past_key_values"] = cache
