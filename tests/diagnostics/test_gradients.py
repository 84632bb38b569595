"""Gradients through time equal known answers and naive computations."""

from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.cells import MIXERS, Edit, ScanningCell
from longrnn.data import TASKS, Task
from longrnn.diagnostics.gradients import (
    factor_per_token,
    jacobian,
    measure,
    numbers,
    spectrum,
    through_time,
)
from longrnn.hf.hybrid.model import HybridLM
from longrnn.models import RecurrentConfig, RecurrentLM, TrainableLM
from longrnn.reporting.training import write_gradients
from longrnn.state import leaves, tree_map, unflatten
from tests.contracts.builders import (
    D_MODEL,
    MIXER_SPECS,
    assert_near,
    build_mixer,
    build_model,
    generator,
    random_tokens,
    random_tree,
    spec_id,
)
from tests.hf.foreign import architecture

WIDTH = 6


def reverse() -> Task:
    return TASKS.build({"kind": "reverse", "vocab_size": 10, "held_out": 16})


def hybrid(kind: str) -> HybridLM:
    return HybridLM(architecture(kind)).in_float64()


def linear_model(matrix: Tensor, nonlinearity: str = "identity") -> RecurrentLM:
    """Return a plain network h ← W h + U x + b."""
    torch.manual_seed(0)
    mixer = {"kind": "rnn", "nonlinearity": nonlinearity}
    config = RecurrentConfig(11, len(matrix), 1, mixer, block="plain", tie_embeddings=False)
    model = RecurrentLM(config).double()
    model.cells[0].get_parameter("cell.weight_hh_l0").data.copy_(matrix)
    return model


def with_eigenvalues(values: list[float]) -> Tensor:
    """Return a matrix that is not normal."""
    frame = torch.randn(WIDTH, WIDTH, generator=generator(1), dtype=torch.float64)
    return frame @ torch.diag(torch.tensor(values).double()) @ torch.linalg.inv(frame)


@pytest.mark.parametrize("largest", [0.75, -0.5, 1.25])
def test_factor_of_a_linear_network(largest: float) -> None:
    """The factor per token is the spectral radius, to 1e-6."""
    model = linear_model(with_eigenvalues([largest, 0.3, -0.2, 0.1, 0.05, 0.01]))
    tokens = random_tokens(4, 64)
    (norms,), _ = through_time(model, tokens, tokens[:, 0])
    assert factor_per_token(norms) == pytest.approx(abs(largest), rel=1e-6)


HYBRIDS = ["falcon_h1", "kimi_linear", "minimax", "recurrent_gemma", "xlstm"]


@pytest.mark.parametrize(
    ("kind", "block"),
    [*product(MIXERS, ["residual", "plain"]), *product(HYBRIDS, [None])],
)
def test_gradients_of_handed_states(kind: str, block: str | None) -> None:
    """Each equals that of a run from this state, without the path through the layer above."""
    model = build_model(kind, block=block) if block else hybrid(kind)
    tokens = random_tokens(3, 7)
    targets = tokens[:, 2]
    norms, _ = through_time(model, tokens, targets)
    for distance in (1, 3, 7):
        start = model(tokens[:, : 7 - distance]).state
        held = tree_map(lambda leaf: leaf.detach().clone(), start)
        of_layers = [numbers(layer) for layer in model.cell_states(held)]
        for leaf in chain(*of_layers):
            leaf.requires_grad_()
        logits = model(tokens[:, 7 - distance :], held).logits[:, -1]
        loss = F.cross_entropy(logits, targets, reduction="sum")
        for flat, found in zip(of_layers, norms, strict=True):
            parts = torch.autograd.grad(loss, flat, materialize_grads=True, retain_graph=True)
            expected = torch.cat([part.flatten(1) for part in parts], 1).norm(dim=1)
            # Far from the loss a gradient may be all but 0 next to the others.
            # Norms and routers of hybrids compute in float32.
            tolerance = 1e-9 if block else 1e-6
            assert_near(found[:, distance - 1], expected, tolerance, kind, 1e-6)


@pytest.mark.parametrize("kind", list(MIXERS))
def test_gradient_of_recurrent_weights(kind: str) -> None:
    model, tokens = build_model(kind), random_tokens(3, 9)
    targets = tokens[:, 1]
    names = model.cells[1].recurrent_weights
    assert names
    loss = F.cross_entropy(model(tokens, keep=1).logits[:, 0], targets)
    weights = [model.cells[1].get_parameter(name) for name in names]
    found = torch.autograd.grad(loss, weights)
    expected = torch.cat([gradient.flatten() for gradient in found])
    assert_near(through_time(model, tokens, targets)[1][1], expected, 1e-9)


@pytest.mark.pictures
def test_measurements_and_their_report(tmp_path: Path) -> None:
    models: dict[str, TrainableLM] = {kind: build_model(kind) for kind in ("rnn", "mamba2")}
    models |= {
        name: linear_model(factor * torch.eye(WIDTH))
        for name, factor in (("large", 1.5), ("one", 1.0), ("zero", 0.0))
    }
    # Its unit is active in every other step, whose derivative is −2.
    models["flips"] = linear_model(torch.diag(torch.tensor([-2.0, 0, 0, 0, 0, 0])), "relu")
    for name, weight in models["flips"].cells[0].named_parameters():
        if name != "cell.weight_hh_l0":
            weight.data.zero_()[0] = float(name == "cell.bias_hh_l0")
    rows = [
        {"model": name, **row}
        for name, model in models.items()
        for row in measure(model, reverse(), 8, rows=3)
    ]
    assert [(row["model"], row["layer"]) for row in rows[:4]] == [
        ("rnn", 0), ("rnn", 1), ("mamba2", 0), ("mamba2", 1),
    ]  # fmt: skip
    assert {len(row["norm"]) for row in rows} == {16}
    first = models["rnn"].cells[0]
    weights = [first.get_parameter(name) for name in first.recurrent_weights]
    assert sum(rows[0]["histogram"]) == sum(map(Tensor.numel, weights))
    assert all(row["factor"] < 1 for row in rows[:4])
    assert rows[4]["factor"] == rows[4]["radius"] == pytest.approx(1.5)
    assert rows[5]["factor"] == pytest.approx(1)
    assert rows[6]["factor"] is None
    assert (rows[7]["radius"], rows[7]["singular"]) == (1, 2), "a mean, and the largest"
    about = {"models": dict.fromkeys(models, "abc"), "task": "reverse", "length": 8}
    files = write_gradients(about, rows, tmp_path)
    assert [file.name for file in files] == [
        "report.html", "norms.png", "weights.png", "gradients.jsonl",
    ]  # fmt: skip
    assert "factor per token" in files[0].read_text()


@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_the_jacobian_equals_that_of_autograd(spec: dict[str, Any]) -> None:
    options = {"backend": "torch"} if issubclass(MIXERS[spec["kind"]], ScanningCell) else {}
    cell = build_mixer({**spec, **options})
    x = random_tree(torch.empty(1, 1, D_MODEL + 2, dtype=torch.float64), 0)
    state = random_tree(cell.init_state(1), 1)
    parts = [leaf for _, leaf in leaves(state)]

    def end_of(flat: Tensor) -> Tensor:
        pieces = flat.split([part.numel() for part in parts])
        given = [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]
        end = cell(x, unflatten(state, given), Edit())[1]
        return torch.cat([leaf.flatten() for _, leaf in leaves(end)])

    start = torch.cat([part.flatten() for part in parts])
    expected = torch.autograd.functional.jacobian(end_of, start)
    assert isinstance(expected, Tensor)
    operator = jacobian(cell, x, state)
    vectors = torch.randn(len(expected), 3, generator=generator(5), dtype=torch.float64)
    assert_near(torch.from_numpy(operator @ vectors.numpy()), expected @ vectors, 1e-10)
    assert_near(torch.from_numpy(operator.rmatmat(vectors.numpy())), expected.T @ vectors, 1e-10)
    largest = torch.linalg.eigvals(expected).abs().max().item()
    # ARPACK, which needs thousands of products where eigenvalues are close, for two of the cells.
    found = [spectrum(operator)]
    found += [spectrum(operator, dense=1)] if spec["kind"] in ("lstm", "mamba2") else []
    for radius, singular in found:
        assert radius == pytest.approx(largest, rel=1e-5)
        assert singular == pytest.approx(torch.linalg.matrix_norm(expected, 2).item())
