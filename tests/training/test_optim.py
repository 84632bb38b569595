"""Learning rates at known steps, and which parameters decay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.training.config import TrainConfig
from longrnn.training.optim import build_optimizer, learning_rate
from tests.training.runs import MAMBA2


def config(**values: Any) -> TrainConfig:
    base = {"learning_rate": 0.5, "warmup_steps": 10, "max_steps": 110}
    return build_config(TrainConfig, {**base, **values})


@pytest.mark.parametrize("kind", ["constant", "cosine", "warmup_stable_decay"])
def test_warm_up_is_linear_from_the_first_step(kind: str) -> None:
    """A first step of rate 0, or a warm-up that ends one step late."""
    rates = [learning_rate(step, config(lr_scheduler_type=kind)) for step in range(10)]
    assert rates == pytest.approx([0.05 * (step + 1) for step in range(10)])


@pytest.mark.parametrize(
    ("kind", "step", "factor"),
    [
        ("constant", 10, 1.0),
        ("constant", 109, 1.0),
        ("cosine", 10, 1.0),
        ("cosine", 35, (1 + math.cos(math.pi / 4)) / 2),
        ("cosine", 60, 0.5),
        ("cosine", 110, 0.0),
        ("cosine", 500, 0.0),
        ("warmup_stable_decay", 10, 1.0),
        ("warmup_stable_decay", 90, 1.0),
        ("warmup_stable_decay", 100, 0.5),
        ("warmup_stable_decay", 109, 0.05),
    ],
)
def test_schedules_at_known_steps(kind: str, step: int, factor: float) -> None:
    """A schedule whose end is not where max_steps is."""
    rate = learning_rate(step, config(lr_scheduler_type=kind, decay_steps=20))
    assert rate == pytest.approx(0.5 * factor)


def test_no_warm_up_and_no_decay() -> None:
    """A division by zero where a phase has no steps."""
    assert learning_rate(0, config(warmup_steps=0)) == 0.5
    stable = config(warmup_steps=0, lr_scheduler_type="warmup_stable_decay")
    assert [learning_rate(step, stable) for step in (0, 108, 109)] == [0.5, 0.5, 0.5]
    assert learning_rate(10, config(max_steps=10)) == 0.5  # warm-up as long as the run


def test_vectors_do_not_decay() -> None:
    """Decay of Mamba-2's A_log and dt_bias, which would move its time scales."""
    torch.manual_seed(0)
    model = RecurrentLM(build_config(RecurrentConfig, MAMBA2))
    optimizer = build_optimizer(model, config(weight_decay=0.1, adam_beta2=0.9))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {
        group["weight_decay"]: {names[id(parameter)] for parameter in group["params"]}
        for group in optimizer.param_groups
    }
    assert groups.keys() == {0.1, 0.0}
    assert groups[0.0] | groups[0.1] == set(names.values())
    for layer in range(2):
        for name in ("A_log", "dt_bias", "D", "norm.weight", "conv1d.bias"):
            assert f"blocks.{layer}.mixer.{name}" in groups[0.0]
        assert f"blocks.{layer}.mixer.in_proj.weight" in groups[0.1]
    assert "embedding.weight" in groups[0.1]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, value in model.named_parameters():
        moved = not torch.equal(value, before[name])
        assert moved == (name in groups[0.1]), name


def test_settings_reach_the_optimizer() -> None:
    """A configuration key that is read and not used."""
    model = torch.nn.Linear(2, 2)
    settings = config(optim="adam", adam_beta1=0.5, adam_beta2=0.6, adam_epsilon=1e-3)
    optimizer = build_optimizer(model, settings)
    assert type(optimizer) is torch.optim.Adam
    assert optimizer.defaults["betas"] == (0.5, 0.6)
    assert optimizer.defaults["eps"] == 1e-3
    assert optimizer.defaults["lr"] == 0.5


def test_unknown_names_are_refused() -> None:
    """A misspelt schedule that silently becomes another."""
    with pytest.raises(UserError, match="did you mean 'adamw'"):
        build_optimizer(torch.nn.Linear(1, 1), config(optim="adamww"))
    with pytest.raises(UserError, match="did you mean 'cosine'"):
        learning_rate(0, config(lr_scheduler_type="cosin"))
