"""A published checkpoint is fine-tuned, killed, resumed and converted, on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load
from tests.training.forks import Fork, pair
from tests.training.journeys import documents, published_mamba2
from tests.training.runs import last_checkpoint, metrics

# Small enough for a test, with everything that a run has.
SMALL = ["max_steps=6", "eval_steps=2", "save_steps=2", "logging_steps=1", "warmup_steps=1"]
SMALL += ["learning_rate=0.01", "eval_length=96", "eval_samples=2", "segments_per_step=2"]
PEFT = "peft={r: 2, alpha: 4, full: [A_log, dt_bias, conv1d], merge: true}"
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published checkpoint `base` and documents `docs`."""
    root = tmp_path_factory.mktemp("journey")
    published_mamba2(root / "base")
    documents(root / "docs")
    return root


def command(shelf: Path, output: Path, *overrides: str) -> list[str]:
    named = ["--data", str(shelf / "docs"), "--length", "32", "--output", str(output)]
    return ["finetune", str(shelf / "base"), *named, "--no-evaluate", "--quiet", *SMALL, *overrides]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(90)[None]).logits.float()


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, FSDP], ids=["copies", "shards"])
@pytest.mark.parametrize("adapters", [False, True], ids=["weights", "adapters"])
def test_two_processes_train_like_one(
    adapters: bool, environment: dict[str, str], shelf: Path, tmp_path: Path
) -> None:
    """Packed streams with a carried state: losses to 1e-6, and the same model in the end."""
    cache = {"LONGRNN_CACHE": str(shelf / "cache")}
    peft = [PEFT] if adapters else []
    rows = "per_device_train_batch_size"
    one = Fork(
        *command(shelf, tmp_path / "one", f"{rows}=4", *peft), folder=tmp_path / "log", **cache
    )
    assert one.end() == 0, one.err
    two = command(shelf, tmp_path / "two", f"{rows}=2", "num_processes=2", *peft)
    both = pair(*two, folder=tmp_path / "pair", **environment, **cache)
    assert [process.end() for process in both] == [0, 0], both[0].err + both[1].err
    expected, found = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert len(found) == len(expected) == 9
    for row, wanted in zip(found, expected, strict=True):
        assert row.keys() == wanted.keys()
        for name in row:
            if "loss" in name:
                assert row[name] == pytest.approx(wanted[name], rel=1e-6), (row["step"], name)
    assert last_checkpoint(tmp_path / "one").name == last_checkpoint(tmp_path / "two").name
    for part in ["", "merged"] if adapters else [""]:
        ours, theirs = (logits(load(tmp_path / name / part)) for name in ("one", "two"))
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-4)
