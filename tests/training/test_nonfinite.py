"""Steps that are not finite stop a run, or are skipped and counted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from longrnn.errors import DivergedError
from longrnn.training import checkpoint
from tests.refusals import naming
from tests.training.runs import metrics, sick, tiny, train

FAST = {"learning_rate": 1e30, "max_grad_norm": math.inf, "warmup_steps": 0}
FAST |= {"lr_scheduler_type": "constant"}


@pytest.mark.parametrize("fault", ["forwards", "backwards"])
def test_a_run_stops_and_names_the_last_healthy_checkpoint(fault: str, tmp_path: Path) -> None:
    """The weights of a step that is not finite are not saved."""
    start = sick(tmp_path / "sick", fault)
    with pytest.raises(DivergedError, match=naming("step", "not finite", "learning_rate")):
        train(tiny("reverse", tmp_path / "run", init_from=start, max_grad_norm=math.inf))
    assert not checkpoint.checkpoints(tmp_path / "run")
    linear = {"d_model": 16, "n_layers": 1, "mixer": {"kind": "rnn", "nonlinearity": "identity"}}
    steady = {"model": linear, "learning_rate": 1e-3}
    train(tiny("reverse", tmp_path / "two", max_steps=4, **{**FAST, **steady}))
    changed = tiny("reverse", tmp_path / "two", max_steps=30, model=linear, **FAST)
    with pytest.raises(DivergedError, match=naming("checkpoint-0000000", "--resume")) as raised:
        train(changed, resume=True)
    saved = checkpoint.checkpoints(tmp_path / "two")[-1]
    assert str(saved) in str(raised.value)
    done = train(tiny("reverse", tmp_path / "two", max_steps=8, **steady), resume=True)
    assert done.rows[-1]["step"] == 8


def test_steps_are_skipped_and_counted(tmp_path: Path) -> None:
    """A run goes on without the steps whose rows hold the bad token."""
    start = sick(tmp_path / "sick", "forwards")
    few = {"per_device_train_batch_size": 1, "length": {"max": 4}, "nonfinite": "skip"}
    few |= {"max_steps": 12, "logging_steps": 1, "seed": 1}
    train(tiny("reverse", tmp_path / "run", init_from=start, **few))
    rows = metrics(tmp_path / "run")
    skipped = [row["step"] for row in rows if "loss" not in row]
    assert 1 <= len(skipped) <= 9
    assert rows[-1]["skipped"] == len(skipped)
