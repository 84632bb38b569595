"""Processes that share the tokens of rows train like one process with whole rows.

Judged by what was written: gloo aborts about one run in ten at its very end.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from longrnn import load
from longrnn.errors import UserError
from longrnn.models.context import ContextGroup
from longrnn.training import checkpoint
from longrnn.training.context import Mesh
from longrnn.training.trainer import Trainer
from tests.devices import GPU
from tests.launched import launch, launched
from tests.refusals import naming
from tests.texts import TEXTS
from tests.training.runs import MAMBA2, metrics, tiny, train, write_config

STEPS: dict[str, Any] = {"max_steps": 4, "logging_steps": 1, "save_steps": 2}
TEXT = {"kind": "text", "files": TEXTS, "max_segments": 5}


def assert_like(one: Path, other: Path) -> None:
    """Equal metrics and weights, to what float32 and another order of sums leave."""
    rows, expected = metrics(other), metrics(one)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        assert row.keys() == wanted.keys()
        for name, value in row.items():
            assert value == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name
    weights = [load(folder).state_dict() for folder in (one, other)]  # type: ignore[attr-defined]
    for name, value in weights[1].items():
        torch.testing.assert_close(value, weights[0][name], atol=1e-4, rtol=1e-3, msg=name)


def two_by_two(folder: Path, **how: Any) -> Path:
    """Trains in one process; returns the configuration of the same run in four."""
    train(tiny("streams", folder / "one", per_device_train_batch_size=4, **how))
    four = {"per_device_train_batch_size": 2, "context_parallel_size": 2, "num_processes": 4}
    return write_config(tiny("streams", folder / "four", **how, **four), folder / "four.yaml")


def test_data_and_context_parallelism_together(tmp_path: Path) -> None:
    """Two groups of two processes, with states carried over steps of two segments."""
    config = two_by_two(tmp_path, **STEPS)
    done = launched("train", config, "--quiet", processes=4)
    assert (tmp_path / "four/model.safetensors").is_file(), done.stderr
    assert_like(tmp_path / "one", tmp_path / "four")


@pytest.mark.slow
def test_a_killed_run_of_context_groups_is_resumed(tmp_path: Path) -> None:
    """Two kills; carried states and validation go on. Each group saves its states once."""
    how = {"validation": TEXT | {"files": TEXTS[:1]}, "task": TEXT | {"files": TEXTS[1:]}}
    how |= {"eval_steps": 2, "eval_length": 96, "eval_samples": 6, **STEPS, "max_steps": 6}
    config = two_by_two(tmp_path, **how)
    for step, number in ((2, signal.SIGTERM), (4, signal.SIGKILL)):
        process = launch("train", config, "--quiet", "--resume", processes=4)
        saved = checkpoint.folder_of(tmp_path / "four", step)
        deadline = time.monotonic() + 120
        while not saved.is_dir() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert saved.is_dir()
        for child in psutil.Process(process.pid).children():
            child.send_signal(number)
        process.communicate(timeout=120)
        assert sorted(path.name for path in saved.glob("carry-*")) == ["carry-0.pt", "carry-1.pt"]
    done = launched("train", config, "--quiet", "--resume", processes=4)
    assert (tmp_path / "four/model.safetensors").is_file(), done.stderr
    assert_like(tmp_path / "one", tmp_path / "four")


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_in_several(tmp_path: Path) -> None:
    """Context groups read the rows of one process each, so their number may change."""
    how = {**STEPS, "lr_scheduler_type": "constant", "warmup_steps": 1}
    train(tiny("carry", tmp_path / "many", **how | {"max_steps": 2}))
    many = tiny("carry", tmp_path / "many", **how, context_parallel_size=2)
    config = write_config(many, tmp_path / "c.yaml")
    done = launched("train", config, "--quiet", "--resume", processes=2)
    assert checkpoint.folder_of(tmp_path / "many", 4).is_dir(), done.stderr
    train(tiny("carry", tmp_path / "whole", **how))
    assert_like(tmp_path / "whole", tmp_path / "many")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("carry", {}),  # a query on a fork of the state
        ("passkey", {"gradient_checkpointing": "segment"}),
        ("passkey", {"mitigation": "sliding_window(window=3)"}),
        ("reverse", {"length": {"max": 3}}),  # more processes than tokens, at times
        ("pass", {}),
        ("fitted_noise", {"max_steps": 6}),
        ("packed", {}),
    ],
)
def test_every_way_to_train(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Tasks with queries, packed rows, short rows and every initial state."""
    how = {**STEPS, **changes}
    if kind == "packed":
        kind, how = (
            "fitted_noise",
            how
            | {
                "task": {"kind": "text", "files": TEXTS, "packing": True},
                "initial_state": {"kind": "zero"},
                "length": {"max": 64},
            },
        )
    train(tiny(kind, tmp_path / "one", **how))
    many = tiny(kind, tmp_path / "many", **how, context_parallel_size=3)
    done = launched("train", write_config(many, tmp_path / "c.yaml"), "--quiet", processes=3)
    assert (tmp_path / "many/model.safetensors").is_file(), done.stderr
    assert_like(tmp_path / "one", tmp_path / "many")


def test_processes_on_gpus_exchange_tensors_on_gpus() -> None:
    """NCCL does not take those of the CPU, on which rows that are not finite are found."""

    class Group(ContextGroup):
        def gather(self, tensor: torch.Tensor) -> torch.Tensor:
            assert tensor.device == GPU
            return torch.tensor([[1, 0, 1], [1, 1, 0]])

    mesh = Mesh(0, 1, Group(None, 0, 2), GPU)
    assert mesh.in_all(torch.tensor([True, False, True])).tolist() == [True, False, False]


def test_a_number_of_processes_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    """One process cannot be two."""
    with pytest.raises(UserError, match="context_parallel_size"):
        Trainer(tiny("passkey", tmp_path / "run", context_parallel_size=2), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_transformer_cannot_be_divided(tmp_path: Path) -> None:
    """Only a recurrent state passes from share to share."""
    with pytest.raises(UserError, match="transformer"):
        tiny("passkey", tmp_path, context_parallel_size=2, transformer={"model_type": "llama"})


def test_repeated_segments_are_refused_before_anything_starts(tmp_path: Path) -> None:
    task = {"kind": "passkey", "max_repeat": 4, "max_segments": 2}
    with pytest.raises(UserError):
        tiny("passkey", tmp_path, context_parallel_size=2, task=task)


def test_a_backend_that_refuses_some_inputs_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    model = {**MAMBA2, "mixer": {**MAMBA2["mixer"], "backend": "mamba_ssm"}}
    with pytest.raises(UserError, match=naming("mamba_ssm", "model.mixer.backend")):
        tiny("passkey", tmp_path, context_parallel_size=2, model=model)
