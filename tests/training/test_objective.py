"""The objective equals its definition for every cell, with and without weights and a query."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.models import RecurrentLM
from longrnn.state import LMState, leaves
from longrnn.tasks import Batch
from longrnn.training.objective import Objective
from tests.contracts.builders import VOCAB, build_model, generator, random_state, random_tokens
from tests.devices import GPU, CopyCounter
from tests.refusals import naming

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


@pytest.mark.parametrize("kind", sorted(MIXERS))
@pytest.mark.parametrize("query_length", [0, QUERY_LENGTH])
def test_a_step_does_not_wait_for_the_device(kind: str, query_length: int) -> None:
    """Two segments, forward and backward: what depends on the batch is counted on the host."""
    model = build_model(kind).to(GPU)
    given = batch(weighted=False, query_length=query_length)
    starts = torch.ones(2, TIME, dtype=torch.bool)
    starts[:, 1:] = False
    given = given._replace(is_document_start=starts)
    objective = Objective(model)
    (placed,) = objective.placed([given], GPU)
    with CopyCounter() as counter:
        output = objective([placed, placed], objective.init_state(2))
        output.loss.backward()
    assert counter.copies == []
    assert output.predictions[0].shape == (2, TIME)


def test_a_batch_that_was_counted_before_gives_the_same_step() -> None:
    """Loss, predictions and gradients have the same bits."""
    model, given = build_model("gru"), batch(weighted=True, query_length=QUERY_LENGTH)
    counted = given._replace(n_scored=int((given.targets >= 0).sum()))
    assert Objective(model).placed([given], GPU)[0].n_scored == counted.n_scored
    assert counted.rows(0, 1).n_scored is None
    state, weights = random_state(model, 2), list(model.parameters())
    outputs = [Objective(model)([one], state) for one in (given, counted)]
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    assert torch.equal(outputs[0].predictions[0], outputs[1].predictions[0])
    gradients = [torch.autograd.grad(output.loss, weights) for output in outputs]
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_ids_are_checked_before_they_reach_a_gpu() -> None:
    """There they would end the process."""
    given = batch(weighted=False, query_length=0)
    given.tokens[1, 3] = VOCAB
    with pytest.raises(UserError, match=naming(VOCAB)):
        Objective(build_model("gru")).placed([given], GPU)
