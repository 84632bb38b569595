"""The cache of `LongRNNForCausalLM`, and what the model makes of its other arguments."""

from __future__ import annotations

import reprlib
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from longrnn.errors import UserError, nearest
from longrnn.models.base import check_tokens
from longrnn.models.recurrent import RecurrentLM
from longrnn.ops.rows import Rows
from longrnn.state import LMState, expand, take

# Arguments of the loss, and what collators and `generate` add for other models.
KNOWN = {"num_items_in_batch", "ignore_index", "shift_labels", "output_attentions", "tokenizer"}
KNOWN |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


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

    def before(self, rows: int) -> LMState | None:
        """The state before a call, in which each row of this cache may serve several rows."""
        known = rows if self.state is None else len(self.state.position)
        if self.state is None or rows == known or rows % known:
            return self.state
        return expand(self.state, rows // known)

    def update_state(self, before: LMState, read: Tensor, time: int, after: LMState) -> None:
        """Replaces the state after a call.

        Args:
            before: the state before the call.
            read: the tokens that it consumed, with the pending ones, without padding.
            time: the tokens per row that were given, with padding.
            after: the state after the call.
        """
        self._length += time
        if self._calls is not None:
            self._calls.append((before, read))
        self.state, self.pending = after, None

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


def check_arguments(position_ids: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Refuses arguments that would have no effect."""
    if position_ids is None and "cu_seq_lens_q" in kwargs:
        raise UserError("cu_seq_lens_q has no effect: mark packed documents by position_ids")
    if kwargs.get("output_attentions"):
        raise UserError("a recurrent model has no attentions: leave out output_attentions")
    for name in kwargs.keys() - KNOWN:
        raise UserError(f"unknown argument {name}: {nearest(name, KNOWN)}")


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


def padding(attention_mask: Tensor | None, read: Tensor) -> Tensor | None:
    """`(b, t)` bool, False where a token is padding; None if there is none.

    Args:
        attention_mask: `(b, past + t)`; None for no padding.
        read: tokens `(b, t)`, or vectors `(b, t, d)`.

    Raises:
        UserError: a mask of another shape.
    """
    if attention_mask is None:
        return None
    mask = attention_mask[:, -read.shape[1] :].bool()
    if mask.shape != read.shape[:2]:
        raise UserError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, and {tuple(read.shape[:2])} "
            "tokens were given: give one row per sequence and one column per token, 1 for a token "
            "and 0 for padding"
        )
    return None if bool(mask.all()) else mask


def packed_documents(position_ids: Tensor | None, read: Tensor) -> Tensor | None:
    """`(b, t)` bool, True at the first token of each packed document; None for one per row.

    Args:
        position_ids: `(b, t)` or `(1, t)`: 0 at the first token of a document, one more at each
            further one. A row whose first position is above 0 continues the given state.
        read: tokens `(b, t)`, or vectors `(b, t, d)`.

    Raises:
        UserError: a position that neither is 0 nor continues its document, or another shape.
    """
    if position_ids is None:
        return None
    starts = position_ids == 0
    continues = nn.functional.pad(position_ids.diff() == 1, (1, 0), value=True)
    is_fit = starts.shape in (read.shape[:2], (1, read.shape[1]))
    if not is_fit or not bool((starts | continues & (position_ids > 0)).all()):
        raise UserError(
            "position_ids must have one position per token, restart at 0 with each document and "
            f"grow by 1 within it, and are {reprlib.repr(position_ids.tolist())} for "
            f"{tuple(read.shape[:2])} tokens: give such positions, or leave them out"
        )
    # A row of one document continues the given state.
    return starts.expand(read.shape[:2]) if bool(starts[:, 1:].any()) else None


def with_hidden_states(
    model: RecurrentLM, read: Tensor, before: LMState, rows: Rows | None, time: int
) -> tuple[Tensor, LMState, list[Tensor]]:
    """`RecurrentLM.hidden` of the last `time` tokens, and the vectors before and after each block.

    Args:
        model: reads the whole text at once.
        read: tokens `(b, t)`, or vectors `(b, t, d)`.
        before: the state before them.
        rows: of the call.
        time: number of tokens.
    """
    if read.ndim == 2:
        read = check_tokens(read, model.vocab_size, rows)
    model.check_state(before, len(read))
    moved = read if rows is None else rows.arrange(read)
    own = None if rows is None else rows.slice(0, moved.shape[1])
    x, position = model.embed(moved, before.position, own)
    found, layers = [x], []
    for block, layer, edit in zip(model.blocks, before.layers, model.edits, strict=True):
        x, layer = block(x, layer, edit, own)
        found.append(x)
        layers.append(layer)
    found[-1] = model.normed(x)
    if rows is not None:
        found = [rows.restore(one[:, rows.first_kept(time) :], time) for one in found]
    elif read.shape[1] != time:
        found = [one[:, -time:] for one in found]
    return found[-1], LMState(position, tuple(layers)), found
