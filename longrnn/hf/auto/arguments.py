"""Checks and conversions of the arguments of `LongRNNForCausalLM`, and its hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from longrnn.errors import UserError, nearest
from longrnn.hf.auto.cache import StateCache
from longrnn.models.recurrent import RecurrentLM
from longrnn.ops.rows import Rows
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
    input_ids: Tensor | None, inputs_embeds: Tensor | None, cache: StateCache, width: int
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
    if inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != width:
        raise UserError(
            f"inputs_embeds has shape {tuple(inputs_embeds.shape)}: give one vector per token, "
            f"(batch, time, {width})"
        )
    if cache.is_recording:
        raise UserError(
            "assisted decoding reads rejected tokens again, and inputs_embeds has no ids: give "
            "input_ids"
        )
    shape = inputs_embeds.shape[:2]
    return torch.zeros(shape, dtype=torch.long, device=inputs_embeds.device)


@contextmanager
def block_outputs(model: RecurrentLM) -> Iterator[list[list[Tensor]]]:
    """A context in which the input of the first block and the output of each are kept, by part.

    Args:
        model: is called in the context, and reads a long text in parts.
    """
    found: list[list[Tensor]] = [[] for _ in range(len(model.blocks) + 1)]
    numbers = {block: number for number, block in enumerate(model.blocks)}

    def see(block: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        if numbers[block] == 0:
            found[0].append(args[0])
        found[numbers[block] + 1].append(output[0])

    handles = [block.register_forward_hook(see) for block in model.blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def hidden_state(parts: list[Tensor], rows: Rows | None, own: int) -> Tensor:
    """The vectors between two blocks at the last `own` tokens, `(b, own, d)`.

    Args:
        parts: of `block_outputs`; one part is returned as it is, the tensor that the model computes
            with.
        rows: of the call.
        own: number of tokens.
    """
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if rows is not None:
        return rows.restore(whole[:, rows.first_kept(own) :], own)
    return whole if whole.shape[1] == own else whole[:, whole.shape[1] - own :]
