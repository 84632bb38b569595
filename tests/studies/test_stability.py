"""Gradient stability against a naive loop of autograd, and where it is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.state import LMState, leaves, tree_map
from longrnn.studies import stability as module
from longrnn.studies.stability import along_checkpoints, stability, triplets
from longrnn.tasks import Reverse
from tests.contracts.builders import MIXER_OPTIONS
from tests.training.runs import tiny, train

TASK = Reverse(vocab_size=7, held_out=4)


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
    """J of one input `(t,)`, an entry of the output after the other, one token after the other."""
    state = model(tokens[None, :1]).state
    layers = tree_map(lambda leaf: leaf.detach().requires_grad_(), state.layers)
    at = LMState(state.position, layers)
    for token in tokens[1:]:
        hidden, at = model.hidden(token.view(1, 1), at)
    z = [leaf for _, leaf in leaves(layers)]
    rows = []
    for entry in hidden[0, -1]:
        found = torch.autograd.grad(entry, z, retain_graph=True)
        rows.append(torch.cat([gradient.flatten() for gradient in found]))
    return torch.stack(rows)


def similarity(one: Tensor, other: Tensor) -> float:
    """The definition, a row at a time."""
    products = sum(float(a @ b) for a, b in zip(one, other, strict=True))
    norms = sum(float(a.norm() * b.norm()) for a, b in zip(one, other, strict=True))
    return products / norms


def test_no_input_is_compared_with_itself() -> None:
    """A pair of equal inputs, whose stability is 1: one in V of those with another first token."""
    found = triplets(TASK, 500, 4, torch.Generator().manual_seed(0))
    base, token, suffix = found.unbind(1)
    assert (base[:, 0] == token[:, 0]).all()
    assert (base[:, 0] != suffix[:, 0]).all()
    assert torch.equal(base[:, 1:], suffix[:, 1:])
    assert suffix[:, 0].unique().tolist() == list(range(7))
    with pytest.raises(UserError, match="must be at least 2"):
        triplets(TASK, 5, 1, torch.Generator())


@pytest.mark.parametrize("changes", [{}, {"block": "residual", "n_layers": 2}], ids=str)
@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm", "mamba2"])
def test_it_is_the_naive_one(
    kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the state left out, rows of the batch mixed, triplets in another order."""
    monkeypatch.setattr(module, "INPUTS", 6)  # two parts
    model = build(kind, **changes)
    inputs = triplets(TASK, 3, 4, torch.Generator().manual_seed(1))
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
        cell = model.mixers[0].cell
        assert isinstance(cell, torch.nn.RNN)
        weight = cell.weight_hh_l0.clone()
    inputs = triplets(TASK, 5, 4, torch.Generator().manual_seed(2))
    found = stability(model, inputs)
    assert torch.allclose(found.same_token, torch.ones(5, dtype=torch.float64))
    assert torch.allclose(found.same_suffix, torch.ones(5, dtype=torch.float64))
    expected = torch.linalg.matrix_power(weight, 7).norm()
    assert torch.allclose(found.norm, expected.expand(5))
    # Without recurrence nothing is left of the first token.
    with torch.no_grad():
        cell.weight_hh_l0.zero_()
    gone = stability(model, inputs)
    assert all(not values.any() for values in gone)


def test_triplets_share_what_they_should() -> None:
    """Pairs that share the wrong part."""
    base, token, suffix = triplets(TASK, 200, 4, torch.Generator().manual_seed(0)).unbind(1)
    assert torch.equal(base[:, 0], token[:, 0])
    assert torch.equal(base[:, 1:], suffix[:, 1:])
    assert (base[:, 1:4] != token[:, 1:4]).any(1).float().mean() > 0.9
    assert (base[:, 4:] == TASK.query).all()
    assert base[:, :4].unique().tolist() == list(range(7))


def test_along_checkpoints(tmp_path: Path) -> None:
    """Checkpoints out of order, or other triplets at each."""
    trainer = train(tiny("reverse", tmp_path / "run", save_total_limit=9))
    task = trainer.task
    assert isinstance(task, Reverse)
    readings = along_checkpoints(tmp_path / "run", task, length=4, n=3, quiet=True)
    assert [reading.step for reading in readings] == [4, 8, 10]
    inputs = triplets(task, 3, 4, torch.Generator().manual_seed(0))
    last = stability(trainer._model().eval(), inputs)
    assert readings[-1].same_token.mean == pytest.approx(float(last.same_token.mean()), abs=1e-6)
    assert readings[-1].norm.n == 3
    with pytest.raises(UserError, match="no checkpoints"):
        along_checkpoints(tmp_path, task, length=4)
    with pytest.raises(UserError, match="at least 1"):
        along_checkpoints(tmp_path / "run", task, length=4, n=0)
