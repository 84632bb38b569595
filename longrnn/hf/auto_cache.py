"""`StateCache`: the state of a recurrent model where transformers expects a cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from longrnn.errors import UserError
from longrnn.state import LMState, take


class Call(NamedTuple):
    """One call of the model.

    Attributes:
        before: the state before it.
        tokens: `(b, t)`, what it consumed.
        is_token: `(b, t)` bool, False where a token is padding; None for no padding.
    """

    before: LMState
    tokens: Tensor
    is_token: Tensor | None


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
        pending: tokens `(b, t)` that the next call consumes first, and their mask; None for none.
    """

    def __init__(self, state: LMState | None = None) -> None:
        super().__init__(layers=[])
        self.state = state
        self.pending: tuple[Tensor, Tensor | None] | None = None
        self._length = 0
        self._calls: list[Call] | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens per row, padding included, that this cache has seen in `generate`."""
        return self._length

    def update_state(
        self, before: LMState, call_tokens: Tensor, is_token: Tensor | None, after: LMState
    ) -> None:
        """Replaces the state after a call.

        Args:
            before: the state before the call.
            call_tokens: `(b, t)`, with the pending ones.
            is_token: their mask; None for no padding.
            after: the state after the call.
        """
        known = 0 if self.pending is None else self.pending[0].shape[1]
        self._length += call_tokens.shape[1] - known
        if self._calls is not None:
            self._calls.append(Call(before, call_tokens, is_token))
        self.state, self.pending = after, None

    def activate_past_recording(self) -> None:
        """Keeps the state before each of the following calls, until `crop`."""
        if self._calls is None:
            self._calls = []

    @property
    def is_recording(self) -> bool:
        """Whether the state before each call is kept."""
        return self._calls is not None

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens, given as a number of at most 0.

        Raises:
            UserError: tokens from before the recording, or of a cache that does not record: a
                recurrent state cannot be shortened.
        """
        remove = -tokens_to_remove
        if remove < 0:
            raise UserError(
                f"crop takes the number of tokens to remove as a number of at most 0, not "
                f"{tokens_to_remove}: give {-tokens_to_remove}"
            )
        self._length -= remove
        if remove and self.pending is not None:
            tokens, mask = self.pending
            kept = max(0, tokens.shape[1] - remove)
            remove -= tokens.shape[1] - kept
            self.pending = _first(tokens, mask, kept)
        calls = [] if self._calls is None else self._calls
        while remove:
            if not calls:
                self._length += remove
                raise UserError(
                    "a recurrent state cannot be shortened: keep the state from before the tokens "
                    "that you want to remove"
                )
            call = calls.pop()
            kept = max(0, call.tokens.shape[1] - remove)
            remove -= call.tokens.shape[1] - kept
            self.state, self.pending = call.before, _first(call.tokens, call.is_token, kept)
        calls.clear()

    def reset(self) -> None:
        """Returns to the state before the first token."""
        self.state, self.pending, self._length = None, None, 0
        if self._calls is not None:
            self._calls = []

    def share(self, rows: int) -> None:
        """Gives each of `rows` rows a state, if that of fewer rows can be repeated for them."""
        known = self.batch_size
        if self.state is not None and known != rows and rows % known == 0:
            self.batch_repeat_interleave(rows // known)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Selects the rows of beams."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows, in the order of `indices`."""
        if self.state is not None:
            self.state = take(self.state, indices.to(self.state.position.device))
        if self.pending is not None:
            tokens, mask = self.pending
            self.pending = tokens[indices], None if mask is None else mask[indices]
        if self._calls:
            self._calls = [
                Call(
                    take(call.before, indices.to(call.before.position.device)),
                    call.tokens[indices],
                    None if call.is_token is None else call.is_token[indices],
                )
                for call in self._calls
            ]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        if self.state is not None:
            rows = torch.arange(self.batch_size, device=self.state.position.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    @property
    def batch_size(self) -> int:
        """Number of rows; −1 before the first call."""
        return -1 if self.state is None else len(self.state.position)

    @property
    def is_initialized(self) -> bool:
        """Whether there is a state."""
        return self.state is not None


def _first(tokens: Tensor, mask: Tensor | None, count: int) -> tuple[Tensor, Tensor | None] | None:
    """The first `count` tokens and their mask; None for none."""
    if not count:
        return None
    return tokens[:, :count], None if mask is None else mask[:, :count]
