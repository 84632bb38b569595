"""Grids of learning rates: the choice by validation, early ends, failures and resuming."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from longrnn.training.metrics import read_metrics

from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.studies.equal_models import NAMES, SIZES, shapes
from longrnn.studies.learning_rates import (
    Goal,
    Trial,
    at_best_rate,
    best,
    run_folder,
    search,
    table,
)
from longrnn.training.config import TrainConfig
from longrnn.training.trainer import Trainer

SHAPES: dict[str, dict[str, Any]] = {
    "transformer": {
        "transformer": {
            "model_type": "llama",
            "vocab_size": 256,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 12,
        }
    },
    "gru": {"model": {"vocab_size": 256, "d_model": 16, "n_layers": 1, "mixer": {"kind": "gru"}}},
}
TASK = {"kind": "recall", "vocab_size": 8}
GOAL = Goal("token_accuracy", 0.999, 2)


def base(model: str, **changes: Any) -> dict[str, Any]:
    return {
        **SHAPES[model],
        "task": TASK,
        "validation": TASK,
        "eval_length": 8,
        "eval_samples": 4,
        "length": {"max": 8},
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "warmup_steps": 1,
        "lr_scheduler_type": "constant",
        **changes,
    }


def run(folder: Path, model: str = "gru", goal: Goal = GOAL, **changes: Any) -> list[Trial]:
    options = base(model, **changes)
    return search(model, options, [1e-3, 1e-2], seeds=2, goal=goal, folder=folder, quiet=True)


@pytest.mark.parametrize("model", sorted(SHAPES))
def test_the_best_rate_gets_all_seeds_and_nothing_is_trained_twice(
    tmp_path: Path, model: str
) -> None:
    """Rows of recall are wider than eval_length, also for a transformer."""
    trials = run(tmp_path, model)
    assert [(one.rate, one.seed) for one in trials[:2]] == [(1e-3, 0), (1e-2, 0)]
    assert (trials[2].rate, trials[2].seed) == (best(trials[:2]).rate, 1)
    for one in trials:
        rows = read_metrics(run_folder(tmp_path, one.rate, one.seed))
        measured = [row for row in rows if "eval_loss" in row]
        assert [row["step"] for row in measured] == [2, 4]
        assert (one.loss, one.score) == (
            measured[-1]["eval_loss"],
            measured[-1]["eval_token_accuracy"],
        )
        assert (one.steps, one.learned) == (4, False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert run(tmp_path, model) == trials
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == before


def test_a_run_ends_at_the_check_at_which_it_reaches_the_goal(tmp_path: Path) -> None:
    trials = run(tmp_path, goal=GOAL._replace(reached=0.0))
    assert {(one.steps, one.learned) for one in trials} == {(2, True)}


@pytest.mark.parametrize("steps", [3, 4])
def test_a_run_that_was_interrupted_between_checks_continues(tmp_path: Path, steps: int) -> None:
    """At step 3 it has passed the check at step 2; at step 4 only its record is missing."""
    folder = run_folder(tmp_path, 1e-3, 0)
    content = base("gru", output_dir=str(folder), learning_rate=1e-3, seed=0, max_steps=steps)
    content["eval_steps"] = GOAL.every
    Trainer(build_config(TrainConfig, content, source="test"), quiet=True).train()
    assert {(one.steps, one.learned) for one in run(tmp_path)} == {(4, False)}


def test_without_a_goal_all_steps_are_trained(tmp_path: Path) -> None:
    trials = run(tmp_path, goal=Goal(None, 1.0, 4))
    assert {(one.steps, one.learned, one.score) for one in trials} == {(4, None, None)}


def test_a_rate_at_which_training_diverges_is_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other rates go on, and the record is read again."""
    options = base("gru", max_grad_norm=math.inf, weight_decay=0.0, spike_threshold=1e30)
    arguments: dict[str, Any] = {"seeds": 1, "goal": GOAL, "folder": tmp_path, "quiet": True}
    trials = search("gru", options, [1e-3, 1e38], **arguments)
    assert [math.isinf(one.loss) for one in trials] == [False, True]
    assert "finite" in str(trials[1].failure)
    assert best(trials).rate == 1e-3
    assert search("gru", options, [1e-3, 1e38], **arguments) == trials


def test_a_configuration_that_cannot_be_trained_is_not_a_result(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="positions"):
        transformer = SHAPES["transformer"]["transformer"] | {"max_position_embeddings": 4}
        run(tmp_path, "transformer", transformer=transformer)
    assert (tmp_path / "trials.jsonl").read_text().count("\n") == 1


def test_a_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(UserError, match="output"):
        run(tmp_path, per_device_train_batch_size=3)
    with pytest.raises(UserError):
        search("gru", base("gru"), [], seeds=1, goal=GOAL, folder=tmp_path)


def test_the_table_shows_the_spread_over_seeds() -> None:
    """Fewest steps to the goal win, then the lowest loss; the best rate is bold."""
    trials = [
        Trial("gru", 1e-3, 0, 400, True, 0.5, 0.96),
        Trial("gru", 3e-3, 0, 200, True, 0.9, 0.95),
        Trial("gru", 1e-2, 0, 400, False, 0.1, 0.5),
        Trial("gru", 3e-3, 1, 300, True, 0.7, 0.97),
    ]
    assert best(trials[:3]).rate == 3e-3
    assert [one.seed for one in at_best_rate(trials)] == [0, 1]
    assert table(trials)[2:] == [
        "| gru | 0.001 | 1 | 1 of 1 | 400 | 0.500 | 0.96 |",
        "| gru | **0.003** | 2 | 2 of 2 | 250 (200 to 300) | 0.800 (0.700 to 0.900) | 0.96 (0.95 to"
        " 0.97) |",
        "| gru | 0.01 | 1 | 0 of 1 | 400 | 0.100 | 0.50 |",
    ]
    failed = [
        one._replace(learned=False, loss=loss)
        for one, loss in zip(trials[:3], [3, 2, 1], strict=True)
    ]
    assert best(failed).rate == 1e-2


def test_the_models_of_a_size_have_about_the_same_number_of_parameters() -> None:
    from longrnn.config import build_config
    from longrnn.training import models
    from longrnn.training.config import TrainConfig

    for size in SIZES:
        counts = [
            sum(
                weight.numel()
                for weight in models.build(
                    build_config(TrainConfig, shapes(size)[name]), None, say=print
                ).parameters()
            )
            for name in NAMES
        ]
        assert max(counts) < 1.1 * min(counts)
    with pytest.raises(UserError, match="1k"):
        shapes("1k")
