"""How `generate` of transformers continues the state of a `LongRNNForCausalLM`."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin

from longrnn.errors import UserError
from longrnn.state import LMState, expand, take


class StateCache(Cache):
    """Holds an `LMState` and implements what `generate` needs of a cache.

    The state is a value: a call replaces it and changes none of its tensors. So a state can be
    given to many calls, and `state` can be kept before and after any of them.

    While the past is recorded (assisted decoding), the state before each call is kept, and `crop`
    returns to it. Tokens of that call that remain are consumed again by the next call.

    Args:
        state: where to start; None for the state before the first token.

    Attributes:
        state: after all consumed tokens, apart from those in `pending`; None before the first.
        pending: tokens `(b, t)` that the next call consumes first; None for none.
    """

    def __init__(self, state: LMState | None = None) -> None:
        super().__init__(layers=[])
        self.state = state
        self.pending: Tensor | None = None
        self._length = 0
        self._calls: list[tuple[LMState, Tensor]] | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens per row, padding included, that this cache has seen in `generate`."""
        return self._length

    def state_for(self, rows: int) -> LMState | None:
        """The state before a call, in which each row of this cache may serve several rows."""
        known = rows if self.state is None else len(self.state.position)
        if self.state is None or rows == known or rows % known:
            return self.state
        return expand(self.state, rows // known)

    def update_state(self, initial: LMState, read: Tensor, time: int, final: LMState) -> None:
        """Replaces the state after a call.

        Args:
            initial: the state before the call.
            read: the tokens that it consumed, with the pending ones, without padding.
            time: the tokens per row that were given, with padding.
            final: the state after the call.
        """
        self._length += time
        if self._calls is not None:
            self._calls.append((initial, read))
        self.state, self.pending = final, None

    def activate_past_recording(self) -> None:
        """Keeps the state before each of the following calls, until `crop`."""
        self._calls = self._calls or []

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens, given as a number of at most 0.

        Raises:
            UserError: tokens from before the recording, or of a cache that does not record.
        """
        calls = self._calls or []
        if self.state is not None and self.pending is not None:  # nothing was read since a `crop`
            calls.append((self.state, self.pending))
        remove = -tokens_to_remove
        while remove:
            if not calls or remove < 0:
                raise UserError(
                    f"crop({tokens_to_remove}) of a recurrent state, which cannot be shortened: "
                    "keep the state from before the tokens that you want to remove"
                )
            self.state, read = calls.pop()
            kept = max(0, read.shape[1] - remove)
            self.pending = read[:, :kept] if kept else None
            self._length -= read.shape[1] - kept
            remove -= read.shape[1] - kept
        calls.clear()

    def reset(self) -> None:
        """Returns to the state before the first token."""
        StateCache.__init__(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Selects the rows of beams."""
        if self.state is not None:
            self.state = take(self.state, beam_idx)


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


class RecurrentGeneration(GenerationMixin):
    """What differs from `GenerationMixin` of transformers."""

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> None:  # pyright: ignore
        """Positions come from the state; those that a user gives mark packed documents."""

    def _prepare_attention_mask_for_generation(  # pyright: ignore
        self, inputs_tensor: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """Takes the pad token for padding, but not at the end of one prompt, nor in a draft."""
        mask: Tensor = super()._prepare_attention_mask_for_generation(
            inputs_tensor, generation_config, model_kwargs
        )
        if generation_config.is_assistant:
            return torch.ones_like(mask)
        is_last = mask.flip(1).cumsum(1).flip(1) == 0
        return mask.masked_fill(is_last, 1) if len(mask) == 1 else mask

    def _prepare_cache_for_generation(  # pyright: ignore
        self, config: Any, model_kwargs: dict[str, Any], *rest: Any
    ) -> None:
        """Puts a `StateCache` where transformers would put a `DynamicCache`.

        With `use_cache=False` there is none, and each call reads the whole text again.

        Raises:
            UserError: another cache, drafts by some of the layers, or padding after which a row
                cannot be continued.
        """
        for name in ("cache_implementation", "assistant_early_exit"):
            if getattr(config, name) is not None:
                raise UserError(
                    f"{name}={getattr(config, name)!r} needs a cache of attention, and this model "
                    "continues a recurrent state: leave it out, or set it to None in the "
                    "generation_config of the model"
                )
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise UserError(
                "the attention_mask has padding on the right, or several prompts end in the pad "
                "token, and a row is continued after its last column: set padding_side='left' in "
                "the tokenizer, or give an attention_mask of ones if the pad token is text"
            )
        if config.use_cache is not False:
            given = model_kwargs.pop("past_key_values", None), model_kwargs.pop("state", None)
            cache = model_kwargs["past_key_values"] = cache_of(*given)
            if config.is_assistant:
                cache.activate_past_recording()
        super()._prepare_cache_for_generation(config, model_kwargs, *rest)  # pyright: ignore
