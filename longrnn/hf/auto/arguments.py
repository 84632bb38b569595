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


class HiddenState:
    """The vectors between two layers at the last tokens of a call, in parts of the text.

    Args:
        rows: of the call.
        own: number of the last tokens.
    """

    def __init__(self, rows: Rows | None, own: int) -> None:
        self._rows, self._own = rows, own
        self._parts: list[Tensor] = []

    def see(self, hidden: Tensor) -> None:
        """Keeps `(b, t, d)`, the next part."""
        self._parts.append(hidden)

    def joined(self) -> Tensor:
        """All parts, `(b, own, d)`; the very tensor with which the model computes, if possible."""
        whole = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts, 1)
        if self._rows is not None:
            first = self._rows.first_kept(self._own)
            return self._rows.restore(whole[:, first:], self._own)
        return whole if whole.shape[1] == self._own else whole[:, whole.shape[1] - self._own :]


@contextmanager
def hidden_states(model: RecurrentLM, rows: Rows | None, own: int) -> Iterator[list[HiddenState]]:
    """A context in which the input of the first block and the output of each are kept.

    Args:
        model: is called in the context.
        rows: of the call.
        own: number of the last tokens whose vectors are wanted.
    """
    found = [HiddenState(rows, own) for _ in range(len(model.blocks) + 1)]
    first = model.blocks[0].register_forward_pre_hook(lambda module, args: found[0].see(args[0]))
    handles = [first]
    for block, one in zip(model.blocks, found[1:], strict=True):
        handles.append(
            block.register_forward_hook(lambda module, args, output, one=one: one.see(output[0]))
        )
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
