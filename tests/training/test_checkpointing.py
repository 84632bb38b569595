"""Runs with activation checkpointing are the same runs without it, on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load
from longrnn.config import load_config
from longrnn.errors import UserError
from longrnn.training.config import TrainConfig
from tests.hf.test_training import LLAMA
from tests.refusals import naming
from tests.texts import TEXTS
from tests.training.runs import assert_same_run, metrics, tiny, train, write_config
from tests.training.test_processes import CPU2, FSDP2, SHORT, trained

# Rows so many that a step goes through several segments of the model.
ROWS = 12


@pytest.mark.parametrize("every", ["block", "segment"])
@pytest.mark.parametrize("kind", ["carry", "streams", "pass", "reverse"])
def test_a_run_has_the_same_bits(kind: str, every: str, tmp_path: Path) -> None:
    """Weights, optimizer, carried states and metrics do not change."""
    changes: dict[str, Any] = {"max_steps": 5, "per_device_train_batch_size": ROWS}
    train(tiny(kind, tmp_path / "one", **changes))
    train(tiny(kind, tmp_path / "two", gradient_checkpointing=every, **changes))
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_a_run_may_be_resumed_with_and_without(tmp_path: Path) -> None:
    """The key may change at every resume."""
    changes: dict[str, Any] = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    changes |= {"save_steps": 2, "logging_steps": 2}
    train(tiny("carry", tmp_path / "one", max_steps=6, **changes))
    for steps, every in ((2, "block"), (4, "no"), (6, "segment")):
        config = tiny(
            "carry", tmp_path / "two", max_steps=steps, gradient_checkpointing=every, **changes
        )
        train(config, resume=steps > 2)
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    ("every", "devices"),
    [
        pytest.param("block", FSDP2, id="block-fsdp2"),
        pytest.param("block", CPU2, id="block-ddp", marks=pytest.mark.slow),
        pytest.param("segment", FSDP2, id="segment-fsdp2", marks=pytest.mark.slow),
        pytest.param("segment", CPU2, id="segment-ddp", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_like_one(every: str, devices: tuple[str, ...], tmp_path: Path) -> None:
    """Copies and shards with recomputation have the weights of one process without it."""
    train(tiny("carry", tmp_path / "one", per_device_train_batch_size=ROWS, **SHORT))
    two = {"per_device_train_batch_size": ROWS // 2, "num_processes": 2, **SHORT}
    config = tiny("carry", tmp_path / "two", gradient_checkpointing=every, **two)
    done = trained(config, tmp_path, devices)
    assert (tmp_path / "two/model.safetensors").is_file(), done.stderr
    for row, wanted in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    weights = [load(tmp_path / name).state_dict() for name in ("one", "two")]
    for name, value in weights[1].items():
        torch.testing.assert_close(value, weights[0][name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("word", ["true", "block", "false", "no"])
def test_a_boolean_means_blocks_or_nothing(word: str, tmp_path: Path) -> None:
    """`true`, as Hugging Face writes it, is `block`."""
    path = write_config(tiny("reverse", tmp_path / "run"), tmp_path / "config.yaml")
    config = load_config(TrainConfig, path, [f"gradient_checkpointing={word}"])
    assert config.gradient_checkpointing == ("block" if word in ("true", "block") else "no")


def transformer_run(folder: Path, **changes: Any) -> TrainConfig:
    task, zero = {"kind": "text", "files": TEXTS}, {"kind": "zero"}
    options = {"transformer": LLAMA, "task": task, "initial_state": zero, "max_steps": 3}
    return tiny("passkey", folder, **options, **changes)


def test_transformers_compute_their_blocks_again(tmp_path: Path) -> None:
    """A transformer trains to the same bits, and has no segments."""
    train(transformer_run(tmp_path / "one"))
    train(transformer_run(tmp_path / "two", gradient_checkpointing="block"))
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")
    with pytest.raises(UserError, match=naming("gradient_checkpointing", "segment")):
        train(transformer_run(tmp_path / "three", gradient_checkpointing="segment"))
