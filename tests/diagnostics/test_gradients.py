"""Gradients through time equal known answers and naive computations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.cells import MIXERS, RNN, Mamba2, ScanningCell
from longrnn.data import TASKS, Batch, Task
from longrnn.diagnostics import gradients_report
from longrnn.diagnostics.gradients import (
    GradientRecord,
    Run,
    default_lengths,
    diagnose,
    fitted_slope,
    last_scored,
    nonfinite,
    norms,
)
from longrnn.diagnostics.jacobian import Step, flatten, lyapunov, spectrum, unflatten
from longrnn.errors import UserError
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.state import leaves, tree_map
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

WIDTH = 6


def reverse(vocab_size: int = 10) -> Task:
    return TASKS.build({"kind": "reverse", "vocab_size": vocab_size, "held_out": 16})


def linear_model(matrix: Tensor) -> RecurrentLM:
    """Return a plain network h ← W h + U x + b."""
    torch.manual_seed(0)
    mixer = {"kind": "rnn", "nonlinearity": "identity"}
    config = RecurrentConfig(11, len(matrix), 1, mixer, block="plain", tie_embeddings=False)
    model = RecurrentLM(config).double()
    model.cells[0].get_parameter("cell.weight_hh_l0").data.copy_(matrix)
    return model


def with_eigenvalues(values: list[float]) -> Tensor:
    """Return a matrix that is not normal."""
    frame = torch.randn(WIDTH, WIDTH, generator=generator(1), dtype=torch.float64)
    return frame @ torch.diag(torch.tensor(values).double()) @ torch.linalg.inv(frame)


def slope_of(model: RecurrentLM, length: int = 64) -> float:
    tokens = random_tokens(4, length)
    (row,) = [r for r in norms(Run(model, tokens), tokens[:, 0]) if r["part"] == "state"]
    return row["slope"]["mean"]


@pytest.mark.parametrize("largest", [0.75, -0.5, 1.25])
def test_slope_of_a_linear_network(largest: float) -> None:
    """The slope is the logarithm of the spectral radius, to 1e-6."""
    values = [largest, 0.3, -0.2, 0.1, 0.05, 0.01]
    found = slope_of(linear_model(with_eigenvalues(values)))
    assert found == pytest.approx(math.log(abs(largest)), abs=1e-6)


def test_slope_of_an_orthogonal_network() -> None:
    """The slope of an orthogonal recurrence is 0 at every distance."""
    drawn = torch.randn(WIDTH, WIDTH, generator=generator(2), dtype=torch.float64)
    model = linear_model(torch.linalg.qr(drawn)[0])
    assert slope_of(model) == pytest.approx(0, abs=1e-12)
    tokens = random_tokens(2, 30)
    (row, *_) = norms(Run(model, tokens), tokens[:, 0])
    assert row["norm"] == pytest.approx([row["norm"][0]] * 30, rel=1e-10)


@pytest.mark.parametrize("block", ["residual", "plain"])
@pytest.mark.parametrize("kind", list(MIXERS))
def test_gradients_of_handed_states(kind: str, block: str) -> None:
    """Each by taking up the run from that state anew: one place too far, a layer mixed up, or what
    the layer above reads counted too."""
    model, tokens = build_model(kind, block=block), random_tokens(3, 7)
    targets = tokens[:, 2]
    table = Run(model, tokens).state_gradients(targets)
    for distance in (1, 3, 7):
        start = model(tokens[:, : 7 - distance]).state
        held = tree_map(lambda leaf: leaf.detach().clone(), start.layers)
        flat = [leaf.requires_grad_() for _, leaf in leaves(held)]
        logits = model(tokens[:, 7 - distance :], start._replace(layers=held)).logits[:, -1]
        loss = F.cross_entropy(logits, targets, reduction="sum")
        found = torch.autograd.grad(loss, flat, materialize_grads=True)
        for (name, _), gradient in zip(leaves(held), found, strict=True):
            layer, _, part = name.partition(".")
            expected = gradient.flatten(1).norm(dim=1)
            # Far from the loss a gradient may be all but 0 next to the others.
            assert_near(table[int(layer)][part][:, distance - 1], expected, 1e-9, name, 1e-6)
    whole = torch.stack([values for part, values in table[0].items() if part != "state"])
    assert_near(table[0]["state"], whole.square().sum(0).sqrt(), 1e-12)


@pytest.mark.parametrize("kind", list(MIXERS))
def test_gradient_of_recurrent_weights(kind: str) -> None:
    """Gradients of recurrent weights equal those of one call on the whole sequence."""
    model, tokens = build_model(kind), random_tokens(3, 9)
    targets = tokens[:, 1]
    names = model.cells[1].recurrent_weights
    assert names
    loss = F.cross_entropy(model(tokens, keep=1).logits[:, 0], targets)
    weights = [model.cells[1].get_parameter(name) for name in names]
    found = torch.autograd.grad(loss, weights)
    expected = torch.cat([gradient.flatten() for gradient in found])
    assert_near(Run(model, tokens).weight_gradients(targets)[1], expected, 1e-9)


def test_slopes_of_rows() -> None:
    """Rows with a gradient of exactly 0 have no slope, and only the far half is fitted."""
    distances = torch.arange(1.0, 21, dtype=torch.float64)
    lines = torch.stack([(-0.1 * distances).exp(), (-0.3 * distances).exp(), 0 * distances])
    lines[0, :10] = 17.0
    found = fitted_slope(lines)
    assert found is not None
    assert (found.n, found.mean) == (2, pytest.approx(-0.2))
    assert fitted_slope(lines[2:]) is None
    assert fitted_slope(lines[:, :2]) is None


def test_the_last_scored_token() -> None:
    """Rows that end before the last scored token are left out, and tokens after it are cut."""
    targets = torch.tensor([[-100, 3, -100, -100], [-100, -100, 4, -100], [5, -100, 6, -100]])
    batch = Batch(torch.arange(12).view(3, 4), targets, torch.ones(3).bool())
    tokens, wanted = last_scored(batch)
    assert tokens.tolist() == [[4, 5, 6], [8, 9, 10]]
    assert wanted.tolist() == [4, 6]


def measure(models: dict[str, Any], folder: Path) -> GradientRecord:
    small: dict[str, Any] = {"lengths": (4, 8), "rows": 3, "exponents": 2}
    return diagnose(models, reverse(), **small, output=folder, quiet=True)


def test_a_record_and_its_report(tmp_path: Path) -> None:
    """The record has every row as JSON, and the report shows its numbers."""
    models = {kind: build_model(kind) for kind in ("rnn", "mamba2")}
    found = measure(models, tmp_path)
    head, *rows = [
        json.loads(line) for line in (tmp_path / "gradients.jsonl").read_text().splitlines()
    ]
    assert head["subjects"] == {name: model.fingerprint() for name, model in models.items()}
    assert len(rows) == len(found.rows)
    for name, parts in (("rnn", {"h", "state"}), ("mamba2", {"conv", "ssm", "state"})):
        of_norms = [row for row in rows if (row["kind"], row["subject"]) == ("norms", name)]
        assert {(row["layer"], row["part"]) for row in of_norms} == {
            (layer, part) for layer in (0, 1) for part in parts
        }
        assert {len(row["norm"]) for row in of_norms} == {16}
        weights = [row for row in rows if (row["kind"], row["subject"]) == ("weights", name)]
        assert [(row["length"], row["layer"]) for row in weights] == [
            (4, 0),
            (4, 1),
            (8, 0),
            (8, 1),
        ]
        exponents = found.of("lyapunov", subject=name)
        assert [len(row["exponents"]) for row in exponents] == [2, 2]
        assert len(found.of("jacobian", subject=name, layer=1)) == 16
        assert [row["norm"] > 0 for row in found.of("loss", subject=name)] == [True, True]
    files = gradients_report.write_report(found, tmp_path)
    assert [file.name for file in files] == [
        "report.html", "norms.png", "weights.png", "jacobian.png", "lyapunov.png",
    ]  # fmt: skip
    page = files[0].read_text()
    assert page.count("<img") == 4
    assert head["subjects"]["rnn"] in page
    assert "vanishes" in gradients_report.summary(found)


def test_an_exploding_network_is_said_to(tmp_path: Path) -> None:
    """The summary tells vanishing, steady and exploding gradients apart."""
    found = measure({"m": linear_model(1.5 * torch.eye(WIDTH))}, tmp_path)
    assert "explodes, × 1.5" in gradients_report.summary(found)
    steady = measure({"m": linear_model(torch.eye(WIDTH))}, tmp_path)
    assert "neither vanishes nor explodes" in gradients_report.summary(steady)
    gone = measure({"m": linear_model(torch.zeros(WIDTH, WIDTH))}, tmp_path)
    assert "exactly 0" in gradients_report.summary(gone)
    gradients_report.write_report(gone, tmp_path)


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    """A value that is not finite is reported with its parameter or state and token, and alone."""
    config = RecurrentConfig(11, WIDTH, 1, {"kind": "rnn", "nonlinearity": "relu"}, block="plain")
    model = RecurrentLM(config)
    weight = model.cells[0].get_parameter("cell.weight_hh_l0")
    weight.data.copy_(1e20 * torch.eye(WIDTH))
    model.cells[0].get_parameter("cell.bias_hh_l0").data.fill_(1.0)
    batch = reverse().sample(2, length=8)
    said = nonfinite(model, batch)
    assert said is not None
    assert ("layers.0.h" in said, "token 2" in said) == (True, True)  # 1, 1e20, then beyond 3e38
    found = measure({"m": model}, tmp_path)
    assert {row["kind"] for row in found.rows} == {"nonfinite"}
    assert "after token 2" in gradients_report.write_report(found, tmp_path)[0].read_text()
    weight.data[0, 0] = math.nan
    assert "blocks.0.mixer.cell.weight_hh_l0" in (nonfinite(model, batch) or "")
    assert nonfinite(build_model("rnn", dtype=torch.float32), batch) is None


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    """Unsuitable models and small vocabularies raise a UserError, and nothing is written."""
    with pytest.raises(UserError):
        measure({"m": nn.Linear(2, 2)}, tmp_path)
    with pytest.raises(UserError):
        diagnose({"m": build_model("gru")}, reverse(100), output=tmp_path)
    assert not list(tmp_path.iterdir())


def test_lengths_of_a_task() -> None:
    """Default lengths are valid for the task."""
    assert default_lengths(reverse()) == [16, 32, 64]
    assert default_lengths(TASKS.build({"kind": "passkey"})) == [256]


def step_of(spec: dict[str, Any]) -> Step:
    options = {"backend": "torch"} if issubclass(MIXERS[spec["kind"]], ScanningCell) else {}
    cell = build_mixer({**spec, **options})
    x = random_tree(torch.empty(1, 1, D_MODEL + 2, dtype=torch.float64), 0)
    return Step(cell, x, random_tree(cell.init_state(1), 1))


def linear(matrix: Tensor) -> Step:
    """Returns h ← W h."""
    cell = RNN(2, len(matrix), nonlinearity="identity").double()
    cell.get_parameter("cell.weight_hh_l0").data.copy_(matrix)
    return Step(cell, torch.zeros(1, 1, 2, dtype=torch.float64), cell.init_state(1))


def diagonal(*rates: float) -> Step:
    return linear(torch.diag(torch.tensor(rates, dtype=torch.float64)))


@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_the_jacobian_equals_that_of_autograd(spec: dict[str, Any]) -> None:
    """Matrix, products and ARPACK's spectrum equal those of a full autograd computation."""
    step = step_of(spec)

    def after(flat: Tensor) -> Tensor:
        return flatten(step.cell(step.x, unflatten(flat[None], step.like))[1])[0]

    expected = torch.autograd.functional.jacobian(after, step.start[0])
    assert isinstance(expected, Tensor)
    assert_near(step.matrix(), expected, 1e-10)
    vectors = torch.randn(3, step.size, generator=generator(5), dtype=torch.float64)
    assert_near(step.product(vectors), vectors @ expected.T, 1e-10)
    assert_near(step.transposed(vectors), vectors @ expected, 1e-10)
    exact, found = spectrum(step, generator(1)), spectrum(step, generator(1), dense=1)
    assert (exact.method, found.method) == ("dense", "arpack")
    assert found.singular == pytest.approx(exact.singular, rel=1e-6)
    assert found.radius == pytest.approx(exact.radius, rel=1e-5)


def test_a_complex_pair_of_a_large_matrix() -> None:
    """The eigenvalue pair ±0.9 i of largest modulus is found."""
    turn = torch.tensor([[0.0, -0.9], [0.9, 0.0]], dtype=torch.float64)
    rest = torch.diag(torch.tensor([0.5 / (k + 1) for k in range(98)], dtype=torch.float64))
    drawn = torch.randn(100, 100, generator=generator(3), dtype=torch.float64)
    frame = torch.linalg.qr(drawn)[0]
    step = linear(frame @ torch.block_diag(turn, rest) @ frame.T)
    assert spectrum(step, generator(0), dense=10)[:2] == pytest.approx((0.9, 0.9), abs=1e-8)


def test_mamba2_decays_are_its_eigenvalues() -> None:
    """The spectrum of a Mamba-2 is its decays: the inputs of the convolution only shift."""
    step = step_of({"kind": "mamba2", "d_state": 5, "head_dim": 4})
    cell = step.cell
    assert isinstance(cell, Mamba2)
    dt = F.softplus(cell.in_proj(step.x)[0, 0, -cell.n_heads :] + cell.dt_bias)
    decays = (-dt * cell.A_log.exp()).exp()
    assert spectrum(step, generator(0)).radius == pytest.approx(decays.max().item(), abs=1e-8)


def test_lyapunov_exponents() -> None:
    """Exponents are logarithms of eigenvalues, those of a product of its matrices; −∞ if lost."""
    rates = (0.9, 0.5, -0.25, 1.1)
    found = lyapunov([diagonal(*rates)] * 100, 9, generator(0))
    assert found == pytest.approx(sorted((math.log(abs(r)) for r in rates), reverse=True), abs=1e-6)
    found = lyapunov([diagonal(2, 0.1), diagonal(0.5, 0.3)] * 40, 2, generator(0))
    assert found == pytest.approx([0.0, math.log(0.03) / 2], abs=1e-6)
    found = lyapunov([diagonal(0.5, 0.0)] * 8, 2, generator(0))
    assert found[0] == pytest.approx(math.log(0.5), abs=1e-3)
    assert found[1] < -20
