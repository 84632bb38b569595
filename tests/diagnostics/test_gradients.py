"""Gradients through time equal known answers and naive computations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import image
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.cells import MIXERS
from longrnn.data import TASKS, Batch, Task
from longrnn.diagnostics import gradients_report
from longrnn.diagnostics.gradients import (
    GradientRecord,
    Settings,
    Subject,
    default_lengths,
    diagnose,
    nonfinite,
)
from longrnn.diagnostics.through_time import (
    BINS,
    Run,
    clipping,
    fitted_slope,
    histogram,
    last_scored,
    norms,
)
from longrnn.errors import UserError
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.state import leaves, tree_map
from longrnn.training.objective import Objective
from tests.contracts.builders import assert_near, build_model, generator, random_tokens
from tests.refusals import naming

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


def test_histogram() -> None:
    """Entries outside the bins are counted in the first or last bin, and zeros separately."""
    found = histogram(torch.tensor([0.0, 1e-30, 2e-3, -2e-3, 5.0, 1e9], dtype=torch.float64))
    assert (found["zeros"], sum(found["counts"])) == (1, 5)
    assert (found["counts"][0], found["counts"][-1]) == (1, 1)
    (place,) = [k for k, edge in enumerate(BINS) if edge <= math.log10(2e-3) < edge + 0.5]
    assert found["counts"][place] == 2
    assert found["largest"] == 1e9


def test_clipping() -> None:
    """Clipping equals that of torch.nn.utils on the same gradient."""
    model, batch = (
        build_model("gru"),
        Batch(random_tokens(3, 9), random_tokens(3, 9, 1), torch.ones(3).bool()),
    )
    found = clipping(model, batch, 0.05, 0.01)

    def gradient() -> Tensor:
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    def backward() -> Tensor:
        model.zero_grad()
        Objective(model)([batch], model.init_state(3)).loss.backward()
        return gradient().clone()

    whole = backward()
    assert found["norm"] == pytest.approx(float(whole.norm()))
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert found["norm_factor"] == pytest.approx(float(gradient().norm() / whole.norm()), rel=1e-4)
    assert found["norm_factor"] < 1
    backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    cut = gradient()
    assert found["value_norm"] == pytest.approx(float(cut.norm()))
    assert found["value_share"] == pytest.approx(float((cut != whole).double().mean()))
    cosine = F.cosine_similarity(cut, whole, dim=0)
    assert found["value_cosine"] == pytest.approx(float(cosine))
    signs = F.cosine_similarity(whole.sign(), whole, dim=0)
    assert clipping(model, batch, 0.05, 1e-320)["value_cosine"] == pytest.approx(float(signs))


def test_the_last_scored_token() -> None:
    """Rows that end before the last scored token are left out, and tokens after it are cut."""
    targets = torch.tensor([[-100, 3, -100, -100], [-100, -100, 4, -100], [5, -100, 6, -100]])
    batch = Batch(torch.arange(12).view(3, 4), targets, torch.ones(3).bool())
    tokens, wanted = last_scored(batch)
    assert tokens.tolist() == [[4, 5, 6], [8, 9, 10]]
    assert wanted.tolist() == [4, 6]


def measure(subjects: list[Subject], folder: Path, **settings: Any) -> GradientRecord:
    small = {"lengths": (4, 8), "rows": 3, "exponents": 2, **settings}
    return diagnose(subjects, reverse(), Settings(**small), output=folder, quiet=True)


def test_a_record_and_its_report(tmp_path: Path) -> None:
    """The record has every row as JSON, and the report shows its numbers."""
    subjects = [Subject(kind, build_model(kind)) for kind in ("rnn", "mamba2")]
    found = measure(subjects, tmp_path)
    head, *rows = [
        json.loads(line) for line in (tmp_path / "gradients.jsonl").read_text().splitlines()
    ]
    assert head["subjects"] == {s.name: s.model.fingerprint() for s in subjects}
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
        assert len(found.of("clipping", subject=name)) == 2
    files = gradients_report.write_report(found, tmp_path)
    assert [file.name for file in files] == [
        "report.html", "norms.png", "weights.png", "jacobian.png", "lyapunov.png",
    ]  # fmt: skip
    page = files[0].read_text()
    assert page.count("<img") == 4
    assert head["subjects"]["rnn"] in page
    assert "vanishes" in gradients_report.summary(found)


def test_the_model_stays_as_it_was(tmp_path: Path) -> None:
    """Diagnosing leaves dtype and gradients of the model unchanged."""
    model = build_model("lstm", dtype=torch.float32)
    before = model.fingerprint()
    measure([Subject("m", model)], tmp_path)
    assert model.fingerprint() == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_exploding_network_is_said_to(tmp_path: Path) -> None:
    """The summary tells vanishing, steady and exploding gradients apart."""
    found = measure([Subject("m", linear_model(1.5 * torch.eye(WIDTH)))], tmp_path)
    assert "explodes, × 1.5" in gradients_report.summary(found)
    steady = measure([Subject("m", linear_model(torch.eye(WIDTH)))], tmp_path)
    assert "neither vanishes nor explodes" in gradients_report.summary(steady)
    gone = measure([Subject("m", linear_model(torch.zeros(WIDTH, WIDTH)))], tmp_path)
    assert "exactly 0" in gradients_report.summary(gone)
    gradients_report.write_report(gone, tmp_path)


def test_exponents_near_0_are_not_drawn_on_the_line_of_0(tmp_path: Path) -> None:
    """Also if other exponents are hundreds of times as large."""
    decay = torch.diag(torch.tensor([0.998] * 2 + [0.5] * (WIDTH - 2)))
    found = measure([Subject("m", linear_model(decay))], tmp_path, exponents=3)
    gradients_report.write_report(found, tmp_path)
    red, green, blue, _ = np.moveaxis(image.imread(tmp_path / "lyapunov.png"), -1, 0)
    height, width = red.shape
    line = (blue > red + 0.4) & (blue > green)
    largest = np.flatnonzero(line[:, int(0.35 * width)]).mean()  # between the first two
    zero = np.argmax(((red == green) & (green == blue) & (red > 0.4) & (red < 0.6)).sum(axis=1))
    assert largest > zero + 0.05 * height


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    """A value that is not finite is reported with its layer, parameter and token, and alone."""
    model = RecurrentLM(
        RecurrentConfig(11, WIDTH, 1, {"kind": "rnn", "nonlinearity": "relu"}, block="plain")
    )
    weight = model.cells[0].get_parameter("cell.weight_hh_l0")
    weight.data.copy_(1e20 * torch.eye(WIDTH))
    model.cells[0].get_parameter("cell.bias_hh_l0").data.fill_(1.0)
    batch = reverse().sample(2, length=8, generator=generator(0))
    said = nonfinite(model, batch)
    assert said is not None
    assert "blocks.0.mixer" in said
    assert "layers.0.h" in said  # 1, 1e20, and then beyond 3e38
    found = measure([Subject("m", model)], tmp_path)
    assert {row["kind"] for row in found.rows} == {"nonfinite"}
    assert "loss" in gradients_report.summary(found)
    assert "after token 2" in gradients_report.write_report(found, tmp_path)[0].read_text()
    weight.data[0, 0] = math.nan
    assert "the weight blocks.0.mixer.cell.weight_hh_l0" in (nonfinite(model, batch) or "")
    assert nonfinite(build_model("rnn", dtype=torch.float32), batch) is None


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    """Unsuitable models, small vocabularies and empty settings raise a UserError."""
    model = build_model("gru")
    with pytest.raises(UserError, match="Linear"):
        measure([Subject("m", nn.Linear(2, 2))], tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=naming(101, 11)):
        diagnose([Subject("m", model)], reverse(100), Settings(), output=tmp_path)
    for changes in ({"rows": 0}, {"exponents": 0}, {"lengths": ()}):
        with pytest.raises(UserError, match="must be from 1 to"):
            measure([Subject("m", model)], tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_lengths_of_a_task() -> None:
    """Default lengths are valid for the task."""
    assert default_lengths(reverse()) == [16, 32, 64]
    assert default_lengths(TASKS.build({"kind": "passkey"})) == [256]
