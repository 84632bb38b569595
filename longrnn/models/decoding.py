"""One token after another: calls of a model, or replays of a CUDA graph.

A small model's token takes a GPU less time than the CPU needs to start its kernels. A CUDA graph
starts them all at once, but reads and writes fixed addresses. `StaticDecoder` therefore holds
buffers for the token and the state. A state is copied in, and copied out again as a value. Of the
carry of a window, gigabytes in a large model, only what a token reads is in the buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from longrnn.models.base import CapturableModel, LanguageModel
from longrnn.state import LMState, clone, leaves, reset

# Capturing a graph takes about as long as this many tokens.
MIN_GRAPH_TOKENS = 16
# Calls before a capture, in which libraries choose kernels and allocate their workspaces.
WARM_UP = 2


class Decoder(Protocol):
    """Consumes one token per row at a time."""

    @property
    def state(self) -> LMState:
        """The state after the last token; later tokens do not change it."""
        ...

    def step(self, tokens: Tensor, done: Tensor | None) -> Tensor:
        """Consumes a token of each row.

        Args:
            tokens: `(b,)` int64, valid ids.
            done: `(b,)` bool, rows that keep their state, which is not changed in place later; None
                for none.

        Returns:
            Logits `(b, v)`, valid until the next call. Those of rows that are done have no meaning.
        """
        ...


def decoder(model: LanguageModel, state: LMState, tokens: int) -> Decoder:
    """The fastest decoder of a model.

    Args:
        model: any language model.
        state: before the first token.
        tokens: how many will be generated at most.
    """
    if _is_capturable(model) and state.position.is_cuda and tokens >= MIN_GRAPH_TOKENS:
        return StaticDecoder(model, state, prepare=captured)
    return CallingDecoder(model, state)


def _is_capturable(model: LanguageModel) -> TypeGuard[CapturableModel]:
    return isinstance(model, CapturableModel) and model.is_capturable


class CallingDecoder:
    """Calls the model for every token."""

    def __init__(self, model: LanguageModel, state: LMState) -> None:
        self._model, self._state = model, state
        self._capturable = model if _is_capturable(model) else None
        self._count()

    def _count(self) -> None:
        """Counts the tokens that need no comparison of their positions with the end of a table."""
        model = self._capturable
        self._checked = None if model is None else _Left(model.static_tokens(self._state))

    @property
    def state(self) -> LMState:
        return self._state

    def step(self, tokens: Tensor, done: Tensor | None) -> Tensor:
        checked = self._checked is not None and self._checked.consume(done)
        options = {"checked": True} if checked else {}
        before = self._state if checked or self._checked is None else _at_zero(self._state, done)
        logits, after = self._model(tokens[:, None], before, keep=1, **options)
        self._state = after if done is None else reset(after, self._state, done)
        if not checked:
            self._count()
        return logits[:, -1]


class StaticDecoder:
    """Works on buffers whose addresses never change.

    How many tokens `CapturableModel.static_state` serves is read once, and then counted on the
    host. The token after them is computed by a call of the model, which gives new values for the
    buffers: where a row reaches the end of a chunk of a window, or of a table of positions.

    Args:
        model: its calls allocate nothing but what they compute.
        state: before the first token; it is not changed.
        prepare: turns the function that computes a token into one that is called instead, as
            `captured` does; by default the function itself is called.
    """

    def __init__(
        self,
        model: CapturableModel,
        state: LMState,
        *,
        prepare: Callable[[Callable[[], Tensor]], Callable[[], Tensor]] | None = None,
    ) -> None:
        self._model = model
        # The state that the buffers were made from.
        self._origin, self._buffers = state, model.static_state(state)
        self._left = _Left(model.static_tokens(state))
        self._tokens = torch.zeros_like(self._buffers.position)
        self._done = torch.zeros_like(self._tokens, dtype=torch.bool)
        self._prepare = prepare or (lambda run: run)
        # Without and with rows that keep their state, which take another pass over it.
        self._runs: dict[bool, Callable[[], Tensor]] = {}

    @property
    def state(self) -> LMState:
        return self._model.state_after(self._origin, self._buffers)

    def step(self, tokens: Tensor, done: Tensor | None) -> Tensor:
        if not self._left.consume(done):
            return self._call(tokens, done)
        some_done = done is not None
        if some_done not in self._runs:
            before = clone(self._buffers)  # preparing a run may consume tokens
            # A graph records the streams of the current device, which may be another GPU.
            with torch.cuda.device(self._tokens.device if self._tokens.is_cuda else None):
                self._runs[some_done] = self._prepare(lambda: self._compute(some_done))
            _copy(self._buffers, before)
        self._tokens.copy_(tokens)
        if done is not None:
            self._done.copy_(done)
        return self._runs[some_done]()

    def _compute(self, some_done: bool) -> Tensor:
        """Consumes the buffered token, and replaces the buffered state."""
        before = self._buffers
        logits, after = self._model(self._tokens[:, None], before, keep=1, checked=True)
        _copy(before, reset(after, before, self._done) if some_done else after)
        return logits[:, -1]

    def _call(self, tokens: Tensor, done: Tensor | None) -> Tensor:
        """Consumes a token by a call with the state itself, and gives the buffers new values."""
        before = self.state
        logits, after = self._model(tokens[:, None], _at_zero(before, done), keep=1)
        self._origin = after if done is None else reset(after, before, done)
        self._left = _Left(self._model.static_tokens(self._origin))
        _copy(self._buffers, self._model.static_state(self._origin))
        return logits[:, -1]


class _Left:
    """How many more tokens each row may consume, counted on the host.

    Args:
        counts: `(b,)`, read from the device; None for any number.
    """

    def __init__(self, counts: Tensor | None) -> None:
        self._counts = None if counts is None else counts.tolist()
        # Rows that keep their state, as they were read last.
        self._done: Tensor | None = None
        self._is_done: list[bool] = []

    def consume(self, done: Tensor | None) -> bool:
        """Counts a token of each row but those that are done; false, and none, if one has no more.

        Args:
            done: see `Decoder.step`; it is read only when it is another tensor than before.
        """
        if self._counts is None:
            return True
        if done is not None and done is not self._done:
            self._done, self._is_done = done, done.tolist()
        rows = [n for n in range(len(self._counts)) if done is None or not self._is_done[n]]
        if any(self._counts[n] == 0 for n in rows):
            return False
        for n in rows:
            self._counts[n] -= 1
        return True


def _at_zero(state: LMState, done: Tensor | None) -> LMState:
    """`state` with the rows that are done at position 0.

    Their next position may be past the end of a table, and the call would refuse it. Nothing that
    it computes for them is used.
    """
    if done is None:
        return state
    return state._replace(position=state.position.masked_fill(done, 0))


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Captures a function of fixed addresses in a CUDA graph, and returns its replay.

    Not yet run on a GPU.

    Args:
        run: is called a few times before.
    """
    # Weights cast by an earlier call are freed with its context: the graph must cast its own.
    own_casts = torch.autocast(
        "cuda",
        dtype=torch.get_autocast_dtype("cuda"),
        enabled=torch.is_autocast_enabled("cuda"),
        cache_enabled=False,
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with own_casts:
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = run()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


def _copy(buffers: LMState, values: LMState) -> None:
    """Copies values into buffers, but for values that were changed in place there."""
    # Tensors of one dtype at a time, which a GPU copies in few launches for all layers.
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for (_, buffer), (_, value) in zip(leaves(buffers), leaves(values), strict=True):
        if buffer is not value:
            into, source = by_dtype.setdefault(buffer.dtype, ([], []))
            into.append(buffer)
            source.append(value)
    for into, source in by_dtype.values():
        torch.ops.aten._foreach_copy_(into, source)
