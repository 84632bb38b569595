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
from longrnn.models.packing import Arrangement
from longrnn.models.recurrent import RecurrentLM
from longrnn.ops.norm import rms_norm
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
        found = self._whole(*args, **kwargs, output_hidden_states=True, logits_to_keep=1)
        return BaseModelOutputWithPast(
            last_hidden_state=found.hidden_states[-1], past_key_values=found.past_key_values
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole.model, name)


def check_arguments(kwargs: dict[str, Any], inputs_embeds: Tensor | None) -> None:
    """Refuses arguments that would have no effect."""
    if inputs_embeds is not None:
        raise UserError("a longrnn model reads token ids, not inputs_embeds: give input_ids")
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


@contextmanager
def block_outputs(model: RecurrentLM, wanted: bool) -> Iterator[list[list[Tensor]]]:
    """Collects the input of the first block and the output of each, one tensor per segment."""
    seen: list[list[Tensor]] = [[] for _ in range(len(model.blocks) + 1)]
    hooks = []
    if wanted:
        first = model.blocks[0]
        hooks.append(first.register_forward_pre_hook(lambda _, given: seen[0].append(given[0])))
        for number, block in enumerate(model.blocks, 1):
            hooks.append(
                block.register_forward_hook(
                    lambda _, __, found, into=seen[number]: into.append(found[0])  # pyright: ignore
                )
            )
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def hidden_states(
    model: RecurrentLM,
    seen: list[list[Tensor]],
    tokens: Tensor,
    is_token: Tensor | None,
    own: int,
) -> tuple[Tensor, ...]:
    """Outputs of the embedding and of each block at the last `own` tokens, 0 at padding.

    Args:
        model: the model without its head.
        seen: see `block_outputs`.
        tokens: `(b, t)`, what the blocks have read.
        is_token: the mask of padding.
        own: number of tokens.

    Returns:
        `(b, own, d)` each; the last one is the input of the head.
    """
    # The blocks have read rows whose tokens were moved to the left.
    arranged = Arrangement(tokens, is_token, None)
    first = arranged.first_kept(own)
    whole = [arranged.restore(torch.cat(parts, 1)[:, first:], own) for parts in seen]
    if model.norm is not None:
        whole[-1] = rms_norm(whole[-1], model.norm.weight, model.config.norm_eps)
    return tuple(whole)
