"""What a user does with a model gives the same on every device: train, evaluate, save, diagnose."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load, state
from longrnn.cells import MIXERS
from longrnn.diagnostics.gradients import through_time
from longrnn.state import tree_map
from longrnn.training.batches import segments
from longrnn.training.config import TrainConfig
from longrnn.training.distributed import build_accelerator
from longrnn.training.objective import Objective
from longrnn.training.trainer import Trainer
from tests.contracts.builders import (
    assert_near,
    assert_trees_equal,
    build_mitigated,
    build_model,
    mitigation_spec,
    random_tokens,
)
from tests.training.runs import metrics, tiny, train

STEPS = 4


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    how = {"logging_steps": 1, "max_steps": STEPS, "warmup_steps": 1, **changes}
    return tiny("carry", folder, lr_scheduler_type="constant", **how)


def exact_loss(config: TrainConfig) -> float:
    """The loss of the first step, on a CPU in float64."""
    trainer = Trainer(config, build_accelerator(config), quiet=True)
    objective = Objective(copy.deepcopy(trainer.model).cpu().double())
    losses = []
    for micro in range(config.gradient_accumulation_steps):
        batches = segments(trainer.task, config, 0, micro)
        start = objective.model.init_state(len(batches[0].begins))
        losses.append(float(objective(batches, start).loss.detach()))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 2e-2)])
def test_a_run_of_training(
    precision: str, tolerance: float, default_device: torch.device, tmp_path: Path
) -> None:
    """Its first loss is that of a CPU in float64, and its rows have the speed and memory."""
    config = config_of(tmp_path / "run", mixed_precision=precision)
    wanted = exact_loss(config)
    trained = train(config)
    assert {one.dtype for one in trained.model().parameters()} == {torch.float32}
    rows = trained.rows
    assert len(rows) == STEPS
    assert rows[0]["loss"] == pytest.approx(wanted, rel=tolerance)
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert ("peak_memory_gib" in row) == (default_device.type == "cuda")


def test_a_run_is_resumed(default_device: torch.device, tmp_path: Path) -> None:
    """With weights, moments and carried states, which are saved from the device."""
    train(config_of(tmp_path / "whole"))
    train(config_of(tmp_path / "parts", max_steps=2))
    train(config_of(tmp_path / "parts"), resume=True)
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert [row["loss"] for row in parts] == pytest.approx([row["loss"] for row in whole], rel=1e-5)
    moved = load(str(tmp_path / "parts"), device=str(default_device))
    tokens = random_tokens(1, 40)
    with torch.no_grad():
        assert_near(
            moved(tokens.to(default_device)).logits.cpu(),
            load(str(tmp_path / "parts"), device="cpu")(tokens).logits,
            1e-5,
        )


BUILDS = {
    **{kind: lambda kind=kind: build_model(kind) for kind in MIXERS},
    "window": lambda: build_mitigated([mitigation_spec("sliding_window")]),
    "norm": lambda: build_mitigated([mitigation_spec("state_norm")], "lstm"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", BUILDS)
def test_a_state_is_saved_on_one_device_and_loaded_on_another(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    """Its model is recognised on both, and each has the same bits."""
    model, there = BUILDS[name](), BUILDS[name]().to(device)
    after = there(random_tokens(2, 20).to(device)).state
    state.save(after, tmp_path / "state", model=there)
    on_cpu, back = (state.load(tmp_path / "state", like=one) for one in (model, there))
    for loaded, where in ((on_cpu, "cpu"), (back, device.type)):
        assert {leaf.device.type for _, leaf in state.leaves(loaded)} == {where}
        assert_trees_equal(tree_map(torch.Tensor.cpu, loaded), tree_map(torch.Tensor.cpu, after))
    more = random_tokens(2, 3, seed=1)
    assert_near(there(more.to(device), back).logits.cpu(), model(more, on_cpu).logits, 1e-9)


@pytest.mark.parametrize("kind", MIXERS)
def test_gradients_of_a_model_in_eval_mode(kind: str, device: torch.device) -> None:
    """Norms through time, for which cuDNN must not run: it refuses cells in eval mode."""
    model, there = (build_model(kind).eval().to(where) for where in ("cpu", device))
    tokens, targets = random_tokens(2, 12), random_tokens(1, 2, seed=1)[0]
    wanted, _ = through_time(model, tokens, targets)
    found, _ = through_time(there, tokens.to(device), targets.to(device))
    for ours, exact in zip(found, wanted, strict=True):
        assert_near(ours.cpu(), exact, 1e-8, kind)
