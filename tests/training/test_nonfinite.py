"""Steps that are not finite stop a run, or are skipped and counted."""

import math
from pathlib import Path

import pytest

from longrnn.errors import DivergedError
from longrnn.training import checkpoint
from longrnn.training.distributed import build_accelerator
from longrnn.training.trainer import Trainer
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
    assert str(checkpoint.checkpoints(tmp_path / "two")[-1]) in str(raised.value)
    done = train(tiny("reverse", tmp_path / "two", max_steps=8, **steady), resume=True)
    assert done.rows[-1]["step"] == 8


def test_a_run_that_stops_closes_its_tracker(tmp_path: Path) -> None:
    """The next run of this process has a tracker of its own."""
    pytest.importorskip("tensorboard")
    start = sick(tmp_path / "sick", "forwards")
    config = tiny("reverse", tmp_path / "run", init_from=start, report_to="tensorboard")
    trainer = Trainer(config, build_accelerator(config), quiet=True)
    with pytest.raises(DivergedError):
        trainer.train()
    assert trainer.accelerator.trackers[0].tracker.file_writer is None


def test_steps_are_skipped_and_counted(tmp_path: Path) -> None:
    start = sick(tmp_path / "sick", "forwards")
    few = {"per_device_train_batch_size": 1, "length": {"max": 4}, "nonfinite": "skip"}
    few |= {"max_steps": 12, "logging_steps": 1, "seed": 1}
    train(tiny("reverse", tmp_path / "run", init_from=start, **few))
    rows = metrics(tmp_path / "run")
    skipped = [row["step"] for row in rows if "loss" not in row]
    assert 1 <= len(skipped) <= 9
    assert rows[-1]["skipped"] == len(skipped)
    more = tiny("reverse", tmp_path / "run", init_from=start, **{**few, "max_steps": 14})
    assert train(more, resume=True).rows[-1]["skipped"] >= len(skipped)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """A step whose loss and gradient are finite may still overflow the weights."""
    with pytest.raises(DivergedError, match=naming("weight", "not finite", "--resume")):
        train(tiny("reverse", tmp_path / "run", save_steps=1, **{**FAST, "learning_rate": 1e39}))
    assert not checkpoint.checkpoints(tmp_path / "run")


def test_carried_rows_start_from_zero_after_a_skipped_step(tmp_path: Path) -> None:
    """The state before the step may be the cause, and belongs to another place of the text."""
    start = sick(tmp_path / "sick", "forwards", "streams", token=ord("b"))
    (tmp_path / "a.txt").write_text("a" * 40 + "b" + "a" * 40)
    how = {"task": {"kind": "text", "data": str(tmp_path / "a.txt")}, "init_from": start}
    how |= {"length": {"max": 8}, "per_device_train_batch_size": 1, "nonfinite": "skip"}
    how |= {"segments_per_step": 1, "gradient_accumulation_steps": 1, "save_steps": 1}
    train(tiny("streams", tmp_path / "run", max_steps=6, **how))
    carried = [
        checkpoint.read_tensors(folder / "carry-0.pt")
        for folder in checkpoint.checkpoints(tmp_path / "run")
    ]
    assert [bool(one) for one in carried] == [True, False]
