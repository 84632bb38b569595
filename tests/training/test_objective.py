"""The objective equals its definition for every cell, with and without weights and a query."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.mixers import MIXERS
from longrnn.models import RecurrentLM
from longrnn.state import LMState, leaves
from longrnn.tasks import Batch
from longrnn.training.objective import Objective
from tests.contracts.builders import VOCAB, build_model, generator, random_state, random_tokens

TIME, QUERY_LENGTH = 20, 6


def batch(*, weighted: bool, query_length: int) -> Batch:
    randomness = generator(1)
    targets = torch.randint(VOCAB, (2, TIME), generator=randomness)
    targets[torch.rand(2, TIME, generator=randomness) < 0.4] = -100
    weights = torch.rand(2, TIME, generator=randomness) if weighted else None
    return Batch(random_tokens(2, TIME), targets, torch.ones(2, dtype=torch.bool), weights,
                 query_length=query_length)  # fmt: skip


def defined(model: RecurrentLM, batch: Batch, state: LMState) -> tuple[Tensor, Tensor, LMState]:
    """The mean over rows of the weighted sum, from all logits; predictions; the carried state."""
    body = TIME - batch.query_length
    logits, carried = model(batch.tokens[:, :body], state)
    logits = torch.cat([logits, model(batch.tokens[:, body:], carried).logits], 1)
    per_token = F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
    scored = (batch.targets != -100).double()
    weights = scored / scored.sum(1, keepdim=True) if batch.weights is None else batch.weights
    predictions = logits.argmax(-1).where(batch.targets >= 0, -100)
    return (per_token * weights).sum(1).mean(), predictions, carried


@pytest.mark.parametrize("kind", sorted(MIXERS))
@pytest.mark.parametrize(("weighted", "query_length"), [(False, 0), (True, QUERY_LENGTH)])
def test_against_the_definition(kind: str, weighted: bool, query_length: int) -> None:
    """Loss, predictions and carried state, which excludes the query, match the definition."""
    model, given = build_model(kind), batch(weighted=weighted, query_length=query_length)
    state = random_state(model, 2)
    loss, predictions, carried = defined(model, given, state)
    output = Objective(model)([given], state)
    assert torch.equal(output.predictions[0], predictions)
    torch.testing.assert_close(output.loss, loss, rtol=1e-6, atol=0)
    for (name, one), (_, other) in zip(leaves(output.state), leaves(carried), strict=True):
        assert torch.equal(one, other), name
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(output.loss, list(parameters.values()))
    expected = torch.autograd.grad(loss, list(parameters.values()))
    for name, one, other in zip(parameters, found, expected, strict=True):
        # The weights of the loss are float32 numbers.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("kind", sorted(MIXERS))
def test_bf16_autocast(kind: str) -> None:
    """Under mixed precision, states and decays keep float32, and the loss stays close."""
    model, given = (
        build_model(kind, dtype=torch.float32),
        batch(weighted=True, query_length=QUERY_LENGTH),
    )
    state = model.init_state(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = Objective(model)([given], state)
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    assert {leaf.dtype for _, leaf in leaves(output.state.layers)} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    exact = defined(model, given, state)[0].item()
    assert output.loss.item() == pytest.approx(exact, rel=0.02)
