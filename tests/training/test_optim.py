"""Learning rates at known steps, and which parameters decay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.models import RecurrentLM
from longrnn.training.config import TrainConfig
from longrnn.training.optim import (
    build_optimizer,
    clip_values,
    decays,
    fill,
    freeze,
    learning_rate,
    set_learning_rate,
)
from tests.contracts.builders import MIXER_SPECS, build_model, spec_id
from tests.refusals import naming


def config(**values: Any) -> TrainConfig:
    base = {"learning_rate": 0.5, "warmup_steps": 10, "max_steps": 110}
    return build_config(TrainConfig, {**base, **values})


@pytest.mark.parametrize("kind", ["constant", "cosine", "warmup_stable_decay"])
def test_warm_up_is_linear_from_the_first_step(kind: str) -> None:
    """The rate rises linearly from the first step and is complete after warmup_steps."""
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
        ("linear", 10, 1.0),
        ("linear", 35, 0.75),
        ("linear", 110, 0.0),
        ("linear", 500, 0.0),
        ("cosine_with_min_lr", 10, 1.0),
        ("cosine_with_min_lr", 60, 0.55),
        ("cosine_with_min_lr", 110, 0.1),
        ("cosine_with_min_lr", 500, 0.1),
        ("warmup_stable_decay", 10, 1.0),
        ("warmup_stable_decay", 90, 1.0),
        ("warmup_stable_decay", 100, 0.5),
        ("warmup_stable_decay", 109, 0.05),
    ],
)
def test_schedules_at_known_steps(kind: str, step: int, factor: float) -> None:
    """Each schedule has its known value at known steps and ends at max_steps."""
    decay = 20 if kind == "warmup_stable_decay" else 0
    least = {"min_lr_rate": 0.1} if kind == "cosine_with_min_lr" else {}
    rate = learning_rate(step, config(lr_scheduler_type=kind, decay_steps=decay, **least))
    assert rate == pytest.approx(0.5 * factor)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("linear", {}), ("cosine", {}), ("cosine_with_min_lr", {"min_lr": 0.1})],
)
def test_schedules_are_those_of_hugging_face(kind: str, options: dict[str, float]) -> None:
    """After the warm-up, every step has the rate of the schedule of this name in transformers."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs: Any = get_scheduler(kind, optimizer, 10, 110, scheduler_specific_kwargs=options)
    ours = config(lr_scheduler_type=kind, **options)
    for step in range(110):
        if step >= 10:  # theirs has a first step of rate 0
            assert learning_rate(step, ours) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_lr": 0.1}, "lr_scheduler_type=cosine"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, ""),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "min_lr": 0.1, "min_lr_rate": 0.1},
            "",
        ),
        ({"lr_scheduler_type": "cosine_with_min_lr", "min_lr": 0.6}, "learning_rate=0.5"),
    ],
)
def test_a_minimum_belongs_to_its_schedule(values: dict[str, Any], message: str) -> None:
    """A minimum learning rate is given once, below the rate, and with its schedule."""
    with pytest.raises(UserError, match=message):
        config(**values)


def test_no_warm_up_and_no_decay() -> None:
    """Phases of no steps are allowed."""
    assert learning_rate(0, config(warmup_steps=0)) == 0.5
    stable = config(warmup_steps=0, lr_scheduler_type="warmup_stable_decay")
    assert [learning_rate(step, stable) for step in (0, 108, 109)] == [0.5, 0.5, 0.5]
    assert learning_rate(10, config(max_steps=10)) == 0.5  # warm-up as long as the run


DECAYED = {"embedding.weight", "head.weight", "merge.weight", "position.table"}
DECAYED |= {"cell.weight_ih_l0", "cell.weight_hh_l0"}
DECAYED |= {"in_proj.weight", "conv1d.weight", "out_proj.weight"}
UNDECAYED = {"A_log", "dt_bias", "D", "norm.weight"}
UNDECAYED |= {"conv1d.bias", "in_proj.bias", "out_proj.bias", "cell.bias_ih_l0", "cell.bias_hh_l0"}


@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
@pytest.mark.parametrize("tied", [False, True])
def test_what_decays(spec: dict[str, Any], tied: bool) -> None:
    """Matrices decay; A_log, dt_bias, D, norms and biases do not.

    A new kind of parameter must be entered above, on one of the two sides.
    """
    model = build_model(spec, position="learned", tie_embeddings=tied)
    optimizer = build_optimizer(model, config(weight_decay=0.1, adam_beta2=0.9))
    decayed, undecayed = set(), set()
    for name, _ in model.named_parameters():
        decayed |= {name for end in DECAYED if name == end or name.endswith(f".{end}")}
        undecayed |= {name for end in UNDECAYED if name == end or name.endswith(f".{end}")}
    names = {name for name, _ in model.named_parameters()}
    assert decayed | undecayed == names
    assert not decayed & undecayed
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, value in model.named_parameters():
        assert (not torch.equal(value, before[name])) == (name in decayed), name


def test_the_rule_goes_by_names_and_not_by_axes_alone() -> None:
    """A matrix named A_log is not decayed."""
    matrix = torch.nn.Parameter(torch.ones(3, 4))
    assert decays("blocks.0.mixer.in_proj.weight", matrix)
    for name in ("A_log", "dt_bias", "D", "norm.weight", "conv1d.bias"):
        assert not decays(f"blocks.0.mixer.{name}", matrix)
    assert not decays("blocks.0.mixer.in_proj.weight", torch.nn.Parameter(torch.ones(3)))


def rates(model: RecurrentLM, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The learning rate of each parameter that the optimizer has."""
    found = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {name: found[p] for name, p in model.named_parameters() if p in found}


def test_scales_of_the_learning_rate() -> None:
    """A factor applies at every step to exactly the parameters of its pattern."""
    model = build_model("mamba2")
    scale = {"*.mixer.*": 0.5, "*.dt_bias": 10.0, "blocks.0.*.dt_bias": 3.0}
    settings = config(learning_rate_scale=scale, weight_decay=0.1)
    optimizer = build_optimizer(model, settings)
    for step in (4, 50):
        set_learning_rate(optimizer, step, settings)
        base = learning_rate(step, settings)
        found = rates(model, optimizer)
        assert found.keys() == {name for name, _ in model.named_parameters()}
        assert found["embedding.weight"] == found["blocks.0.norm.weight"] == base
        assert found["blocks.1.mixer.in_proj.weight"] == 0.5 * base
        assert found["blocks.1.mixer.A_log"] == 0.5 * base
        # The last pattern that matches counts.
        assert found["blocks.0.mixer.dt_bias"] == 3 * base
        assert found["blocks.1.mixer.dt_bias"] == 10 * base


def test_frozen_parts() -> None:
    """Frozen parameters are not in the optimizer; a tied head is found by both names."""
    model = build_model("mamba2", tie_embeddings=True)
    freeze(model, ["head.weight", "blocks.0.*"])
    found = rates(model, build_optimizer(model, config()))
    assert "embedding.weight" not in found
    assert {name.split(".")[1] for name in found if name.startswith("blocks.")} == {"1"}
    assert not model.embedding.weight.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze": ["*.dt_bais"]}, naming("*.dt_bais")),
        ({"freeze": ["embeding.weight"]}, "embedding.weight"),
        ({"freeze": ["blocks.2.*"]}, naming("blocks.2.*")),
        ({"freeze": ["*"]}, ""),
        ({"learning_rate_scale": {"*.A_lag": 2.0}}, naming("*.A_log")),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(changes: dict[str, Any], message: str) -> None:
    """A pattern that matches no parameter, or everything, is refused."""
    model, settings = build_model("mamba2"), config(**changes)
    with pytest.raises(UserError, match=message) as error:
        freeze(model, settings.freeze)
        build_optimizer(model, settings)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_filled_parts() -> None:
    """Exactly the matching parameters get the value; other values are refused."""
    model, plain = build_model("mamba2"), build_model("mamba2").state_dict()
    fill(model, {"*.dt_bias": -1.0, "blocks.0.*.dt_bias": -3.0, "blocks.0.mixer.A_log": 2.5})
    expected = {
        "blocks.0.mixer.dt_bias": -3.0, "blocks.1.mixer.dt_bias": -1.0, "blocks.0.mixer.A_log": 2.5,
    }  # fmt: skip
    for name, value in model.state_dict().items():
        wanted = torch.full_like(value, expected[name]) if name in expected else plain[name]
        assert torch.equal(value, wanted), name
    with pytest.raises(UserError, match=naming("*.A_lag")):
        fill(model, {"*.A_lag": 1.0})
    with pytest.raises(UserError, match="nan"):
        config(fill={"*.A_log": float("nan")})


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_factors_out_of_range(factor: float) -> None:
    """A factor that is not above 0 is refused."""
    with pytest.raises(UserError, match="freeze"):
        config(learning_rate_scale={"*": factor})


def test_settings_reach_the_optimizer() -> None:
    """Every optimizer key of the configuration is used."""
    model = torch.nn.Linear(2, 2)
    settings = config(optim="adam", adam_beta1=0.5, adam_beta2=0.6, adam_epsilon=1e-3)
    optimizer = build_optimizer(model, settings)
    assert type(optimizer) is torch.optim.Adam
    assert optimizer.defaults["betas"] == (0.5, 0.6)
    assert optimizer.defaults["eps"] == 1e-3
    assert optimizer.defaults["lr"] == 0.5


def test_unknown_names_are_refused() -> None:
    """An unknown optimizer or schedule is refused with the nearest name."""
    with pytest.raises(UserError, match="adamw"):
        build_optimizer(torch.nn.Linear(1, 1), config(optim="adamww"))
    with pytest.raises(UserError, match="cosine"):
        learning_rate(0, config(lr_scheduler_type="cosin"))


def test_clipped_values() -> None:
    """Entries beyond the limit are clipped, the others are unchanged."""
    parameters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))]
    parameters[0].grad = torch.tensor([3.0, -0.2, -7.0, 0.5])
    clip_values(parameters, 0.5)
    assert parameters[0].grad.tolist() == pytest.approx([0.5, -0.2, -0.5, 0.5])
    assert parameters[1].grad is None
