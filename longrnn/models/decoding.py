"""One token after another: calls of a model, or replays of a CUDA graph.

A small model's token takes a GPU less time than the CPU needs to start its kernels. A CUDA graph
starts them all at once, but reads and writes fixed addresses. `StaticDecoder` therefore holds
buffers for the token and the state. A state is copied in, and copied out again as a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from longrnn.models.base import CapturableModel, LanguageModel
from longrnn.ops.triton import on_device
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
            done: `(b,)` bool, rows that keep their state; None for none.

        Returns:
            Logits `(b, v)`, valid until the next call.
        """
        ...


def decoder(model: LanguageModel, state: LMState, tokens: int) -> Decoder:
    """The fastest decoder of a model.

    Args:
        model: any language model.
        state: before the first token.
        tokens: how many will be generated at most.
    """
    capturable = isinstance(model, CapturableModel) and model.is_capturable
    if capturable and state.position.is_cuda and tokens >= MIN_GRAPH_TOKENS:
        return StaticDecoder(model, state, prepare=captured)
    return CallingDecoder(model, state)


class CallingDecoder:
    """Calls the model for every token."""

    def __init__(self, model: LanguageModel, state: LMState) -> None:
        self._model, self._state = model, state

    @property
    def state(self) -> LMState:
        return self._state

    def step(self, tokens: Tensor, done: Tensor | None) -> Tensor:
        logits, after = _call(self._model, tokens, self._state)
        self._state = after if done is None else reset(after, self._state, done)
        return logits


class StaticDecoder:
    """Works on buffers whose addresses never change.

    Args:
        model: its calls allocate nothing but what they compute, and read nothing back.
        state: before the first token; it is copied.
        prepare: turns the function that computes a token into one that is called instead, as
            `captured` does; by default the function itself is called.
    """

    def __init__(
        self,
        model: LanguageModel,
        state: LMState,
        *,
        prepare: Callable[[Callable[[], Tensor]], Callable[[], Tensor]] | None = None,
    ) -> None:
        self._model, self._state = model, clone(state)
        self._tokens = torch.zeros_like(state.position)
        self._done = torch.zeros_like(state.position, dtype=torch.bool)
        self._prepare = prepare or (lambda run: run)
        # Without and with rows that keep their state, which take another pass over it.
        self._runs: dict[bool, Callable[[], Tensor]] = {}

    @property
    def state(self) -> LMState:
        return clone(self._state)

    def step(self, tokens: Tensor, done: Tensor | None) -> Tensor:
        some_done = done is not None
        if some_done not in self._runs:
            before = clone(self._state)  # preparing a run may consume tokens
            # A graph records the streams of the current device, which may be another GPU.
            with on_device(self._tokens):
                self._runs[some_done] = self._prepare(lambda: self._compute(some_done))
            _copy(self._state, before)
        self._tokens.copy_(tokens)
        if done is not None:
            self._done.copy_(done)
        return self._runs[some_done]()

    def _compute(self, some_done: bool) -> Tensor:
        """Consumes the buffered token, and replaces the buffered state."""
        logits, after = _call(self._model, self._tokens, self._state)
        _copy(self._state, reset(after, self._state, self._done) if some_done else after)
        return logits


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


def _call(model: LanguageModel, tokens: Tensor, state: LMState) -> tuple[Tensor, LMState]:
    """Logits `(b, v)` and state after a token that a model has generated itself."""
    checked = {"checked": True} if isinstance(model, CapturableModel) else {}
    logits, after = model(tokens[:, None], state, keep=1, **checked)
    return logits[:, -1], after


def _copy(buffers: LMState, values: LMState) -> None:
    for (_, buffer), (_, value) in zip(leaves(buffers), leaves(values), strict=True):
        buffer.copy_(value)
