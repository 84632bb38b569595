"""Gradient diagnostics allocate on the device of the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from longrnn.data import Reverse
from longrnn.diagnostics import jacobian
from longrnn.diagnostics.gradients import Settings, jacobians
from longrnn.diagnostics.jacobian import Step, arnoldi, golub_kahan, lyapunov, spectrum
from longrnn.diagnostics.through_time import Run, clipping, histogram, last_scored, norms
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.studies.stability import stability, triplets
from tests.contracts.builders import (
    D_MODEL,
    MIXER_OPTIONS,
    MIXER_SPECS,
    build_mixer,
    generator,
    random_tree,
    spec_id,
)

# What is allocated without a device is then on `meta`, and meets no tensor of a model elsewhere.
ELSEWHERE = torch.device("meta")
TASK = Reverse(vocab_size=7, held_out=4)


def model_of(kind: str) -> RecurrentLM:
    mixer = {"kind": kind, **MIXER_OPTIONS.get(kind, {})}
    return RecurrentLM(RecurrentConfig(vocab_size=8, d_model=8, n_layers=1, mixer=mixer)).eval()


@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_jacobians(spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense matrix, both Krylov methods and the QR method run on the device of the state."""
    mixer = build_mixer(spec)
    x = random_tree(torch.empty(1, 1, D_MODEL + 2, dtype=torch.float64), 0)
    step = Step(mixer, x, random_tree(mixer.init_state(1), 1))
    monkeypatch.setattr(jacobian, "KRYLOV", 6)
    with ELSEWHERE:
        assert spectrum(step, generator(0)).method == "dense"
        assert arnoldi(step, generator(0)) >= 0
        assert golub_kahan(step, generator(0))[0] > 0
        assert len(lyapunov([step, step], 2, generator(0))) == 2


@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm", "mamba2"])
def test_stability(kind: str) -> None:
    """The stability of inputs runs on the device of the model."""
    (condition,) = TASK.conditions()
    inputs = triplets(TASK, condition, 2, length=4, generator=generator(0))
    model = model_of(kind)
    with ELSEWHERE:
        found = stability(model, inputs)
    assert all(values.device == model.embedding.weight.device for values in found)


@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm", "mamba2"])
def test_gradients_through_time(kind: str) -> None:
    """Norms, histograms and clipping run on the device of the model."""
    model = model_of(kind)
    batch = TASK.sample(2, length=4, generator=generator(0))
    tokens, targets = last_scored(batch)
    wide = copy.deepcopy(model).double()
    with ELSEWHERE:
        assert clipping(wide, batch, 1.0, 0.01)["norm"] > 0
        run = Run(wide, tokens)
        assert all(histogram(found)["norm"] > 0 for found in run.weight_gradients(targets))
        assert all(row["slope"] is not None for row in norms(run, targets))
        assert {row["kind"] for row in jacobians(wide, tokens[:1], Settings(lengths=(4,)))} == {
            "jacobian",
            "lyapunov",
        }
