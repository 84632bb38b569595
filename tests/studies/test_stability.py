"""Gradient stability equals a naive autograd loop and known values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.data import TASKS, Condition, Reverse, Transduction
from longrnn.errors import UserError
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.state import LMState, leaves, tree_map
from longrnn.studies import stability as module
from longrnn.studies.stability import along_checkpoints, stability, triplets
from tests.contracts.builders import MIXER_OPTIONS
from tests.training.runs import tiny, train

TASK = Reverse(vocab_size=7, held_out=4)
(ALL,) = TASK.conditions()


def dual(vocab_size: int = 6) -> Transduction:
    task = TASKS.build(
        {"kind": "reverse_dual_frequency", "vocab_size": vocab_size, "held_out": 4}, None
    )
    assert isinstance(task, Transduction)
    return task


def drawn(n: int, seed: int, *, length: int = 4, condition: Condition = ALL) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return triplets(TASK, condition, n, length=length, generator=generator)


def build(kind: str, **changes: Any) -> RecurrentLM:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "vocab_size": 8,
        "d_model": 8,
        "n_layers": 1,
        "block": "plain",
        "tie_embeddings": False,
        "mixer": {"kind": kind, **MIXER_OPTIONS.get(kind, {})},
        "position": {"kind": "sinusoidal"},
    }
    return RecurrentLM(RecurrentConfig(**options | changes)).double()


def jacobian(model: RecurrentLM, tokens: Tensor) -> Tensor:
    """Return J of one input `(t,)`, one output entry and one token at a time."""
    state = model(tokens[None, :1]).state
    layers = tree_map(lambda leaf: leaf.detach().requires_grad_(), state.layers)
    at = LMState(state.position, layers)
    hidden, at = model.hidden(tokens[None, 1:2], at)
    for token in tokens[2:]:
        hidden, at = model.hidden(token.view(1, 1), at)
    z = [leaf for _, leaf in leaves(layers)]
    rows = []
    for entry in hidden[0, -1]:
        found = torch.autograd.grad(entry, z, retain_graph=True)
        rows.append(torch.cat([gradient.flatten() for gradient in found]))
    return torch.stack(rows)


def similarity(one: Tensor, other: Tensor) -> float:
    """Compute the definition, one row at a time."""
    products = sum(float(a @ b) for a, b in zip(one, other, strict=True))
    norms = sum(float(a.norm() * b.norm()) for a, b in zip(one, other, strict=True))
    return products / norms


def test_no_input_is_compared_with_itself() -> None:
    """The inputs of a pair always differ."""
    base, token, suffix = drawn(500, 0, length=2).unbind(1)
    assert (base[:, 1] != token[:, 1]).all()
    base, token, suffix = drawn(500, 0).unbind(1)
    assert (base[:, 0] == token[:, 0]).all()
    assert (base[:, 0] != suffix[:, 0]).all()
    assert torch.equal(base[:, 1:], suffix[:, 1:])
    assert suffix[:, 0].unique().tolist() == list(range(7))
    with pytest.raises(UserError, match="length.max"):
        drawn(5, 0, length=1)
    with pytest.raises(UserError, match="vocab_size"):
        drawn(5, 0, condition=Condition("rare target, rare disturbants", range(6, 7), range(6)))


def test_frequent_and_rare_tokens_are_drawn_apart() -> None:
    """Target and disturbants are drawn from all tokens of their classes, and from no others."""
    task = dual()
    seen = []
    for condition in task.conditions():
        generator = torch.Generator().manual_seed(0)
        inputs = triplets(task, condition, 200, length=4, generator=generator)
        base, token, suffix = inputs.unbind(1)
        assert inputs[:, :, 0].unique().tolist() == list(condition.target)
        assert inputs[:, :, 1:4].unique().tolist() == list(condition.disturbants)
        assert (inputs[:, :, 4:] == task.query).all()
        assert torch.equal(base[:, 0], token[:, 0])
        assert (base[:, 0] != suffix[:, 0]).all()
        assert torch.equal(base[:, 1:], suffix[:, 1:])
        seen.append((condition.name, condition.target, condition.disturbants))
    assert seen == [
        ("frequent target, frequent disturbants", range(3), range(3)),
        ("frequent target, rare disturbants", range(3), range(3, 6)),
        ("rare target, frequent disturbants", range(3, 6), range(3)),
        ("rare target, rare disturbants", range(3, 6), range(3, 6)),
    ]


@pytest.mark.parametrize("changes", [{}, {"block": "residual", "n_layers": 2}], ids=str)
@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm", "mamba2"])
def test_it_equals_the_definition_token_by_token(
    kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stability and norm equal those of Jacobians taken entry by entry, in every condition."""
    monkeypatch.setattr(module, "INPUTS", 6)  # two parts
    model = build(kind, **changes).eval()
    task = dual()
    generator = torch.Generator().manual_seed(1)
    parts = [
        triplets(task, condition, 1, length=4, generator=generator)
        for condition in task.conditions()
    ]
    inputs = torch.cat(parts)
    found = stability(model, inputs)
    for index, triplet in enumerate(inputs):
        base, token, suffix = (jacobian(model, one) for one in triplet)
        assert float(found.same_token[index]) == pytest.approx(similarity(base, token), abs=1e-10)
        assert float(found.same_suffix[index]) == pytest.approx(similarity(base, suffix), abs=1e-10)
        assert float(found.norm[index]) == pytest.approx(float(base.norm()), rel=1e-9)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_linear_cell_has_the_same_gradient_everywhere() -> None:
    """A relu cell that never clips is linear: J = W^(t − 1) for every input."""
    model = build("rnn", mixer={"kind": "rnn", "nonlinearity": "relu"}, position={"kind": "none"})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
        cell = model.cells[0].cell
        assert isinstance(cell, torch.nn.RNN)
        _, recurrent, _, _ = cell.all_weights[0]
        weight = recurrent.clone()
    inputs = drawn(5, 2)
    found = stability(model, inputs)
    assert torch.allclose(found.same_token, torch.ones(5, dtype=torch.float64))
    assert torch.allclose(found.same_suffix, torch.ones(5, dtype=torch.float64))
    expected = torch.linalg.matrix_power(weight, 7).norm()
    assert torch.allclose(found.norm, expected.expand(5))
    # Without recurrence nothing is left of the first token.
    with torch.no_grad():
        recurrent.zero_()
    gone = stability(model, inputs)
    assert all(not values.any() for values in gone)


def test_triplets_share_what_they_should() -> None:
    """The second input shares the first token of the base, the third all other tokens."""
    base, token, suffix = drawn(200, 0).unbind(1)
    assert torch.equal(base[:, 0], token[:, 0])
    assert torch.equal(base[:, 1:], suffix[:, 1:])
    assert (base[:, 1:4] != token[:, 1:4]).any(1).float().mean() > 0.9
    assert (base[:, 4:] == TASK.query).all()
    assert base[:, :4].unique().tolist() == list(range(7))


def test_along_checkpoints(tmp_path: Path) -> None:
    """Checkpoints are read in the order of their steps, with the same triplets for each."""
    trainer = train(tiny("reverse", tmp_path / "run", save_total_limit=9))
    task = trainer.task
    assert isinstance(task, Reverse)
    readings = along_checkpoints(tmp_path / "run", task, length=4, n=3, quiet=True)
    assert [reading.step for reading in readings] == [4, 8, 10]
    (condition,) = task.conditions()
    generator = torch.Generator().manual_seed(0)
    inputs = triplets(task, condition, 3, length=4, generator=generator)
    model = trainer.model.eval()
    assert isinstance(model, RecurrentLM)
    last = stability(model, inputs)
    assert readings[-1].same_token.mean == pytest.approx(float(last.same_token.mean()), abs=1e-6)
    assert readings[-1].norm.n == 3
    assert {reading.condition for reading in readings} == {None}
    with pytest.raises(UserError, match="checkpoints"):
        along_checkpoints(tmp_path, task, length=4)
    with pytest.raises(UserError, match="n must be from 1 to"):
        along_checkpoints(tmp_path / "run", task, length=4, n=0)


def test_every_checkpoint_is_measured_under_every_condition(tmp_path: Path) -> None:
    """A run with frequent and rare tokens has four rows per checkpoint, with different inputs."""
    run = tmp_path / "run"
    trainer = train(
        tiny(
            "reverse",
            run,
            save_total_limit=9,
            task={"kind": "reverse_dual_frequency", "vocab_size": 6, "held_out": 4},
        )
    )
    task = trainer.task
    assert isinstance(task, Transduction)
    readings = along_checkpoints(run, task, length=4, n=3, quiet=True)
    names = [condition.name for condition in task.conditions()]
    assert [(reading.step, reading.condition) for reading in readings] == [
        (step, name) for step in (4, 8, 10) for name in names
    ]
    assert len({reading.same_token for reading in readings[-4:]}) == 4
