"""The published settings of reverse ordering build, and take two steps on a CPU."""

from __future__ import annotations

import re
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from longrnn.sweep.grid import expand, parse_axes

from longrnn.config import load_config
from longrnn.positions import POSITIONS
from longrnn.tasks.sequence import SequenceTask
from longrnn.training.config import TrainConfig
from longrnn.training.trainer import Trainer
from tests.training.runs import metrics

CONFIGS = Path(__file__).parents[2] / "configs/train"
PUBLISHED = sorted(
    path.stem for path in CONFIGS.glob("*.yaml") if "arXiv 2402.00236" in path.read_text()
)
# What two steps on a CPU may change: the number of rows and of steps, never model or task.
SMALL = ["per_device_train_batch_size=2", "max_steps=2", "warmup_steps=1", "logging_steps=1"]
# What arXiv 2402.00236 gives, for all of its runs.
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 512,
    "max_steps": 300_000,
    "warmup_steps": 1000,
    "lr_scheduler_type": "cosine",
    "optim": "adam",
    "learning_rate": 1e-3,
    "adam_beta1": 0.9,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-9,
    "max_grad_norm": 1.0,
    "mixed_precision": "no",
}


def config_of(name: str, *overrides: str) -> TrainConfig:
    return load_config(TrainConfig, CONFIGS / f"{name}.yaml", list(overrides))


def grid_of(name: str) -> list[str]:
    """The axes that the configuration's own comment gives for `longrnn sweep`."""
    comment = " ".join(
        line.lstrip("# ").rstrip("\\ ")
        for line in (CONFIGS / f"{name}.yaml").read_text().splitlines()
        if line.startswith("#")
    )
    grid = comment.split("--grid ")[1].split(" longrnn ")[0]
    return [re.sub(r"^seed=.*", "seed=111", axis) for axis in re.findall(r"[\w.]+=[\w,.]+", grid)]


def test_the_published_settings_are_there() -> None:
    assert PUBLISHED == ["reverse_dual_lstm", "reverse_gru", "reverse_lstm"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_are_those_of_the_source(name: str) -> None:
    """Optimizer, schedule, batch, length and model are those of the paper."""
    config = config_of(name)
    assert {key: getattr(config, key) for key in SETTINGS} == SETTINGS
    assert config.length.max == 64
    model = config.model
    assert model is not None
    assert (model.d_model, model.n_layers, model.block) == (512, 1, "plain")
    assert model.position["combine"] == "concat"
    assert config.task["held_out"] == 1024
    assert config.save_total_limit * config.save_steps == config.max_steps  # all checkpoints stay


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_run_of_the_grid_builds(name: str) -> None:
    """Every combination of the grid in the comment, with one seed, builds (`expand` tries it)."""
    runs = expand(config_of(name), parse_axes(grid_of(name)), Path("runs"))
    assert {run.values["position.kind"] for run in runs} == set(POSITIONS)
    for run in runs:
        assert run.config.model is not None
        assert run.config.model.vocab_size == run.config.task["vocab_size"] + 1


@pytest.mark.parametrize(("position", "name"), list(zip(POSITIONS, cycle(PUBLISHED))))
def test_two_steps_on_a_cpu(name: str, position: str, tmp_path: Path) -> None:
    """The published model trains at the published length; only rows and steps are fewer."""
    axes = parse_axes([f"position.kind={position}"])
    [run] = expand(config_of(name, *SMALL), axes, tmp_path)
    trainer = Trainer(run.config, quiet=True)
    assert isinstance(trainer.task, SequenceTask)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    after = trainer.train().state_dict()
    losses = [row["loss"] for row in metrics(tmp_path / run.name)]
    chance = torch.tensor(float(trainer.task.n_tokens)).log()
    assert len(losses) == 2
    assert losses[0] == pytest.approx(float(chance), rel=0.05)
    assert trainer.tokens == 2 * 2 * 128
    moved = {key for key in after if not after[key].equal(before[key])}
    assert {"embedding.weight", "head.weight"} <= moved


@pytest.mark.slow
def test_two_steps_with_the_largest_vocabulary(tmp_path: Path) -> None:
    """V = 16,384, the largest one of the source."""
    wide = ["task.vocab_size=16384", "model.vocab_size=16385", f"output_dir={tmp_path / 'run'}"]
    Trainer(config_of("reverse_lstm", *SMALL, *wide), quiet=True).train()
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
