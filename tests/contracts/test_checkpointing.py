"""Activation checkpointing changes no bit of values, states and gradients.

For every cell, position encoding and mitigation, over several segments from a carried state.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longrnn.models import RecurrentLM
from longrnn.state import LMState
from tests.contracts.builders import build_model, random_state, random_tokens
from tests.contracts.subjects import Subject, every_kind, outcome, small_chunks, started

pytestmark = pytest.mark.core

TIME, SIZES = 100, [80, 20]  # segments of 64, 16 and 20 tokens


def count_calls(model: RecurrentLM, tokens: Tensor, state: LMState) -> int:
    """How often the first cell runs in one forward and, with gradients, backward pass."""
    calls: list[None] = []
    with model.cells[0].register_forward_pre_hook(lambda *_: calls.append(None)):
        logits = model(tokens, state).logits
        if logits.requires_grad:
            logits.sum().backward()
    model.zero_grad()
    return len(calls)


@every_kind
def test_the_same_bits_are_computed_twice(subject: Subject) -> None:
    """Values, final state and gradients; without gradients nothing is computed again."""
    model, tokens = subject.build(), random_tokens(2, TIME)
    state = started(model, 2)
    with small_chunks(16):
        expected = outcome(model, tokens, state, SIZES)
        runs = count_calls(model, tokens, state)
        model.gradient_checkpointing_enable()
        assert count_calls(model, tokens, state) == 2 * runs
        with torch.no_grad():
            assert count_calls(model, tokens, state) == runs
        for name, tensor in outcome(model, tokens, state, SIZES).items():
            assert torch.equal(tensor, expected[name]), name
        model.gradient_checkpointing_enable(False)
        assert count_calls(model, tokens, state) == runs


@pytest.mark.parametrize("kind", ["mamba2", "lstm"])
def test_autocast(kind: str) -> None:
    """A block is computed again in the precision in which it was computed first."""
    model = build_model(kind, dtype=torch.float32)
    state, tokens = random_state(model, 2), random_tokens(2, 40)

    def gradients() -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens, state).logits.float().square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = gradients()
    model.gradient_checkpointing_enable()
    for ours, theirs in zip(gradients(), expected, strict=True):
        assert torch.equal(ours, theirs)
