"""Recomputation changes no bit of values, states and gradients.

For every cell, position encoding and mitigation, over several segments from a carried state.
"""

import pytest
import torch
from torch import Tensor

from longrnn.data import UNSCORED, Batch
from longrnn.training import objective
from longrnn.training.objective import Objective
from tests.contracts.builders import (
    build_model,
    differentiable,
    random_state,
    random_tokens,
    real_leaves,
)
from tests.contracts.subjects import (
    Subject,
    cell_leaves,
    every_kind,
    gradients,
    outcome,
    parameters,
    random_masks,
    small_chunks,
    started,
)

pytestmark = pytest.mark.core

TIME, SIZES = 100, [80, 20]  # segments of 64, 16 and 20 tokens


@every_kind
def test_the_same_bits_are_computed_twice(subject: Subject) -> None:
    model, tokens = subject.build(), random_tokens(2, TIME)
    state = started(model, 2)
    with small_chunks(16):
        expected = outcome(model, tokens, state, SIZES)
        model.gradient_checkpointing_enable()
        for name, tensor in outcome(model, tokens, state, SIZES).items():
            assert torch.equal(tensor, expected[name]), name


@every_kind
def test_recomputed_segments_have_the_same_bits(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of padded rows, with states kept before each segment or group of segments."""
    model, tokens = subject.build(), random_tokens(2, TIME + 1)
    is_token, starts = random_masks(2, TIME)
    targets = tokens[:, 1:].where(is_token, UNSCORED)
    weights = torch.ones(2, TIME, dtype=torch.float64)
    whole = Batch(tokens[:, :-1], targets, starts, weights, is_token=is_token)

    def found(*, recomputes: bool) -> dict[str, Tensor]:
        start = differentiable(started(model, 2))
        with small_chunks(16):
            output = Objective(model, recomputes=recomputes)(whole.split(14), start)
            given = {**real_leaves(start, "state."), **parameters(model)}
            final = cell_leaves(model, output.state)
            grads = gradients((output.loss, list(final.values())), given)
        return {"loss": output.loss, "ids": torch.cat(output.predictions, 1)} | final | grads

    expected = found(recomputes=False)
    for most in (128, 2):
        monkeypatch.setattr(objective, "MAX_KEPT_STATES", most)
        for name, tensor in found(recomputes=True).items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", ["mamba2", "lstm"])
def test_autocast(kind: str) -> None:
    """A block is computed again in the precision of the first time, and only with gradients."""
    model = build_model(kind, dtype=torch.float32)
    state, tokens, calls = random_state(model, 2), random_tokens(2, 40), []
    model.cells[0].register_forward_pre_hook(lambda *_: calls.append(None))

    def found() -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens, state).logits.float().square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = found()
    model.gradient_checkpointing_enable()
    for ours, theirs in zip(found(), expected, strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        model(tokens, state)
    assert len(calls) == 1 + 2 + 1
