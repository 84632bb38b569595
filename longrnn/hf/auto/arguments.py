"""Checks and conversions of the arguments of `LongRNNForCausalLM`, and its hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from longrnn.errors import UserError, nearest
from longrnn.hf.auto.cache import StateCache
from longrnn.state import LMState

# Arguments of the loss, and what collators add for kernels of attention.
LOSS = ("num_items_in_batch", "ignore_index", "shift_labels")
UNUSED = ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "output_attentions")


class Backbone:
    """Calls a `LongRNNForCausalLM` for what its head multiplies; other attributes are its model's.

    Args:
        whole: the model with its head.
    """

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def __call__(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        """See `LongRNNForCausalLM.forward`; the result has `last_hidden_state`, `(b, t, d)`."""
        kwargs |= {"output_hidden_states": True, "logits_to_keep": 1}
        # Not `self._whole(…)`: accelerate wraps the instance's `forward` in one autocast context,
        # which stays enabled if it is entered again within itself, as TRL's trainers would do.
        found = type(self._whole).forward(self._whole, *args, **kwargs)
        return BaseModelOutputWithPast(
            last_hidden_state=found.hidden_states[-1], past_key_values=found.past_key_values
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole.model, name)


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuses arguments that would have no effect."""
    if kwargs.get("output_attentions"):
        raise UserError("a recurrent model has no attentions: leave out output_attentions")
    for name in kwargs:
        if name not in LOSS + UNUSED:
            raise UserError(f"unknown argument {name}: {nearest(name, (*LOSS, 'input_ids'))}")


def check_devices(model: Any) -> None:
    """Refuses a model whose device_map puts it on several devices.

    A cell calls the weights of its projections without the modules whose hooks accelerate would
    use to move them, and a state lives on one device.
    """
    devices = set(map(str, getattr(model, "hf_device_map", {}).values()))
    if len(devices) > 1:
        raise UserError(
            f"the device_map puts the model on {', '.join(sorted(devices))}, and it runs on "
            "one device: give device_map={'': 'cuda:0'}, or a smaller dtype"
        )


def cache_of(given: Any, state: LMState | None) -> StateCache:
    """The cache of a call, from a cache or a state; a new one without either.

    Raises:
        UserError: both, or a cache of another kind.
    """
    if given is None:
        return StateCache(state)
    if not isinstance(given, StateCache):
        raise UserError(
            f"past_key_values is a {type(given).__name__}: give the StateCache of an earlier call, "
            "or a state as state="
        )
    if state is not None:
        raise UserError("both past_key_values and state were given: give one of them")
    return given


def joined(
    left: Tensor | None, right: Tensor | None, before: Tensor, tokens: Tensor
) -> Tensor | None:
    """The masks of two stretches of tokens as one; None if there is no padding in either."""
    if left is None and right is None:
        return None
    whole = [
        torch.ones_like(part, dtype=torch.bool) if mask is None else mask
        for mask, part in ((left, before), (right, tokens))
    ]
    return torch.cat(whole, 1)


def after_padding(is_token: Tensor) -> Tensor:
    """`(b, t)` bool, True where the column before is padding."""
    return nn.functional.pad(~is_token[:, :-1], (1, 0))


def check_inputs(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, cache: StateCache
) -> Tensor:
    """Token ids, `(b, t)`; zeros where embeddings are given instead.

    Raises:
        UserError: neither or both, or embeddings for a cache that records token ids.
    """
    if inputs_embeds is None:
        if input_ids is None:
            raise UserError("input_ids is missing: give the token ids, (batch, time)")
        return input_ids
    if input_ids is not None:
        raise UserError("both input_ids and inputs_embeds were given: give one of them")
    if inputs_embeds.ndim != 3:
        raise UserError(
            f"inputs_embeds has shape {tuple(inputs_embeds.shape)}: give one vector per token, "
            "(batch, time, hidden_size)"
        )
    if cache.is_recording:
        raise UserError(
            "assisted decoding reads rejected tokens again, and inputs_embeds has no ids: give "
            "input_ids"
        )
    shape = inputs_embeds.shape[:2]
    return torch.zeros(shape, dtype=torch.long, device=inputs_embeds.device)


class HiddenStates:
    """Collects the output of the embedding and of each block at the last tokens of a call.

    The model computes with the collected tensors themselves, so that they have gradients.

    Args:
        own: number of the last tokens.
    """

    def __init__(self, own: int) -> None:
        self.found: list[Tensor] = []
        self._own = own

    def __call__(self, _: int, hidden: Tensor) -> Tensor:
        """Keeps `(b, t, d)`, and returns it for the next layer."""
        before = hidden.shape[1] - self._own
        self.found.append(hidden[:, before:] if before else hidden)
        return hidden
