"""Activation checkpointing changes no bit of values, states and gradients.

For every cell, position encoding and mitigation, over several segments from a carried state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.mitigations import Mitigated
from longrnn.models import RecurrentLM, recurrent
from longrnn.models.recompute import GRANULARITIES
from longrnn.state import LMState
from tests.contracts import builders
from tests.contracts.builders import (
    BLOCK_KINDS,
    DEFINED,
    DTYPES,
    MIXER_SPECS,
    POSITION_SPECS,
    build_mitigated,
    build_model,
    model_outcome,
    random_start,
    random_state,
    random_tokens,
    spec_id,
)
from tests.refusals import naming

pytestmark = pytest.mark.core

TIME = 40
every_granularity = pytest.mark.parametrize("every", [g for g in GRANULARITIES if g != "no"])


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two segments of 16 tokens and a rest."""
    monkeypatch.setattr(recurrent, "segment_width", lambda *given: 16)


def assert_same_bits(model: RecurrentLM | Mitigated, state: LMState, every: str) -> None:
    """Values, final state and gradients with and without recomputation, state carried over."""
    tokens, sizes = random_tokens(2, TIME), [24, 16]
    inner = builders.recurrent(model) if isinstance(model, Mitigated) else model
    expected = model_outcome(model, tokens, state, sizes)
    runs = count_calls(inner, model, tokens, state)
    inner.gradient_checkpointing_enable(every)
    assert count_calls(inner, model, tokens, state) == 2 * runs
    for name, tensor in model_outcome(model, tokens, state, sizes).items():
        assert torch.equal(tensor, expected[name]), name
    inner.gradient_checkpointing_disable()
    assert count_calls(inner, model, tokens, state) == runs


def count_calls(
    inner: RecurrentLM, model: RecurrentLM | Mitigated, tokens: Tensor, state: LMState
) -> int:
    """How often the first cell runs in one forward and backward pass."""
    calls: list[None] = []
    handle = inner.mixers[0].register_forward_pre_hook(lambda *_: calls.append(None))
    with handle:
        model(tokens, state).logits.sum().backward()
    model.zero_grad()
    return len(calls)


@every_granularity
@pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_every_cell(spec: dict[str, Any], dtype: torch.dtype, every: str) -> None:
    """Each cell computes twice and gives the same bits."""
    model = build_model(spec, dtype=dtype)
    assert_same_bits(model, random_state(model, 2), every)


@every_granularity
@pytest.mark.parametrize("block", BLOCK_KINDS)
@pytest.mark.parametrize("position", [spec["kind"] for spec in POSITION_SPECS])
def test_every_position_encoding(position: str, block: str, every: str) -> None:
    """Positions come from the state, also when a segment is computed again."""
    model = build_model(position=position, block=block)
    assert_same_bits(model, random_state(model, 2), every)


@every_granularity
@pytest.mark.parametrize(("spec", "mixer"), DEFINED, ids=spec_id)
def test_every_mitigation(spec: dict[str, Any], mixer: dict[str, Any], every: str) -> None:
    """The carry of a mitigation enters a recomputed block as its state does."""
    model = build_mitigated([spec], mixer)
    assert_same_bits(model, random_start(model, 2), every)


@every_granularity
@pytest.mark.parametrize("kind", ["mamba2", "lstm"])
def test_autocast(kind: str, every: str) -> None:
    """A block is computed again in the precision in which it was computed first."""
    model = build_model(kind, dtype=torch.float32)
    state, tokens = random_state(model, 2), random_tokens(2, TIME)

    def gradients() -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens, state).logits.float().square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = gradients()
    model.gradient_checkpointing_enable(every)
    for ours, theirs in zip(gradients(), expected, strict=True):
        assert torch.equal(ours, theirs)


@every_granularity
def test_states_are_carried_through_many_calls(every: str) -> None:
    """The gradient flows through all of a chain of calls, of which the first states are leaves."""
    model = build_model()
    pieces = random_tokens(2, 400).split(100, dim=1)

    def gradients() -> list[Tensor]:
        state, losses = random_state(model, 2), []
        for piece in pieces:
            logits, state = model(piece, state)
            losses.append(logits.square().mean())
        return list(torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters())))

    expected = gradients()
    model.gradient_checkpointing_enable(every)
    for ours, theirs in zip(gradients(), expected, strict=True):
        assert torch.equal(ours, theirs)


@every_granularity
def test_without_gradients_nothing_is_computed_twice(every: str) -> None:
    """Inference is not affected."""
    model = build_model()
    model.gradient_checkpointing_enable(every)
    calls: list[None] = []
    model.mixers[0].register_forward_pre_hook(lambda *_: calls.append(None))
    with torch.no_grad():
        model(random_tokens(2, 16))
    assert len(calls) == 1


def test_unknown_words_are_refused() -> None:
    """The nearest word is named."""
    enable: Callable[[str], None] = build_model().gradient_checkpointing_enable
    with pytest.raises(UserError, match=naming("gradient_checkpointing", "blocks")):
        enable("blocks")
