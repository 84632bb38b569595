"""A loss that is finite and far too large: reported, and rolled back on request."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer

from longrnn.errors import UserError
from longrnn.tasks import Batch
from longrnn.training import checkpoint, replay
from longrnn.training.data import Source
from longrnn.training.spikes import MOST_ROLLBACKS, SpikeGuard
from longrnn.training.trainer import Trainer
from tests.cli.conftest import CLI, cli  # noqa: F401
from tests.refusals import naming
from tests.tasks.corpora import text_corpus
from tests.training.runs import assert_same_run, crash, metrics, tiny, train, write_config

DIVERGING: dict[str, Any] = {"learning_rate": 8.0, "lr_scheduler_type": "constant"}
DIVERGING |= {"max_grad_norm": math.inf, "warmup_steps": 8, "max_steps": 10, "save_steps": 2}
ROLLBACK: dict[str, Any] = {"on_spike": "rollback", "logging_steps": 1}


def scale_loss(monkeypatch: pytest.MonkeyPatch, wrong: set[int], factor: float = 1e4) -> None:
    """Multiplies the loss of the batches of some steps, counted from 0."""
    whole = Source.segments

    def segments(self: Source, step: int, micro: int) -> list[Batch]:
        batches = whole(self, step, micro)
        if step not in wrong:
            return batches
        answers = [batch.answers().float() for batch in batches]
        return [
            batch._replace(weights=factor * answer / answer.sum(1, keepdim=True))
            for batch, answer in zip(batches, answers, strict=True)
        ]

    monkeypatch.setattr(Source, "segments", segments)


def test_a_finite_divergence_is_reported(cli: CLI, tmp_path: Path) -> None:  # noqa: F811
    """A run that diverges ends with a message that names the step and the checkpoint."""
    config = tiny("reverse", Path("run"), **DIVERGING)
    write_config(config, tmp_path / "c.yaml")
    done = cli("train", "c.yaml", "--quiet")
    assert done.code == 2, done.out
    (line,) = done.err.splitlines()
    (kept,) = replay.files(tmp_path / "run")
    last = checkpoint.checkpoints(tmp_path / "run")[-1]
    pieces = (f"error: step {replay.steps(kept)}: the loss is ", f"go on from {last.name} by")
    for piece in (*pieces, "a lower learning_rate=4", "or with --resume on_spike=rollback"):
        assert piece in line
    assert cli("replay", str(Path("run") / kept.name)).code == 0
    # The remedy is allowed: the run goes on with a lower rate.
    again = cli("train", "c.yaml", "--quiet", "--resume", "learning_rate=1e-4", "on_spike=ignore")
    assert again.code == 0, again.err


def test_a_loss_that_is_ignored_ends_the_run_normally(tmp_path: Path) -> None:
    """With `on_spike: ignore` no loss stops a run."""
    train(tiny("reverse", tmp_path, on_spike="ignore", **DIVERGING))
    assert not replay.files(tmp_path)


@pytest.mark.parametrize("kind", ["passkey", "streams"])
def test_a_rollback_leaves_out_the_batches_since_the_checkpoint(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rollback the run is one that never had these batches, bit for bit."""
    changes = dict(ROLLBACK)
    if kind == "streams":
        changes["initial_state"] = {"kind": "carry", "zero_share": 0.0}
    with monkeypatch.context() as patch:
        scale_loss(patch, {6})
        rolled = train(tiny(kind, tmp_path / "rolled", **changes))
    assert (rolled.step, rolled.spikes.skipped_batches) == (10, 3)
    whole = Source.segments

    # The checkpoint of step 4 is the newest one: the batches of steps 4, 5 and 6 are left out.
    def shifted(self: Source, step: int, micro: int) -> list[Batch]:
        first, *others = whole(self, step + 3 * (step >= 4), micro)
        if step == 4 and self.streams:
            # Streams whose document began in these batches restart.
            begun = [
                batch.begins for left_out in (4, 5, 6) for batch in whole(self, left_out, micro)
            ]
            starts = first.is_document_start.clone()
            starts[:, 0] |= torch.stack(begun).any(0)
            first = first._replace(is_document_start=starts)
        return [first, *others]

    monkeypatch.setattr(Source, "segments", shifted)
    train(tiny(kind, tmp_path / "planned", **{**changes, "on_spike": "stop"}))
    names = ("model.safetensors", "checkpoint-00000010/carry-0.pt")
    for name in names:
        one, other = (tmp_path / run / name for run in ("rolled", "planned"))
        assert one.read_bytes() == other.read_bytes(), name
    rows = metrics(tmp_path / "rolled")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row.pop("skipped_batches") for row in rows] == [0] * 4 + [3] * 6
    assert rows == metrics(tmp_path / "planned")


def test_a_run_that_rolled_back_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash before or after the next checkpoint does not change a run that rolled back."""
    scale_loss(monkeypatch, {6, 11})
    straight, broken = (tiny("passkey", tmp_path / name, **ROLLBACK) for name in ("a", "b"))
    train(straight)
    crash(broken, 5, monkeypatch)  # of the repeated steps, or of the first ones: the same
    crash(broken, 9, monkeypatch, resume=True)
    train(broken, resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_rollback_with_float16_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of a spike are discarded with the record that the loss scaler has of them."""
    scale_loss(monkeypatch, {6})
    trainer = Trainer(tiny("passkey", tmp_path, **ROLLBACK), quiet=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    inner = trainer.optimizer.optimizer
    trainer.optimizer = AcceleratedOptimizer(inner, device_placement=False, scaler=scaler)
    trainer.accelerator.scaler = scaler
    # As accelerate does where the precision is fp16, which it refuses on a CPU.
    clip = trainer.accelerator.clip_grad_norm_

    def unscale_and_clip(*arguments: Any) -> Any:
        scaler.unscale_(inner)
        return clip(*arguments)

    monkeypatch.setattr(trainer.accelerator, "clip_grad_norm_", unscale_and_clip)
    trainer.train()
    assert (trainer.step, trainer.spikes.skipped_batches) == (10, 3)


def packed_stream(tmp_path: Path, **changes: Any) -> Trainer:
    """A run on two streams of documents of 5 to 40 tokens, in segments of 16 tokens."""
    texts = ["abcdefghij"[: 5 + k % 6] * (1 + k % 4) for k in range(60)]
    task = {"kind": "text", "corpus": text_corpus(tmp_path / "c", texts), "packing": True}
    how = {"task": task, "length": {"max": 16}, "initial_state": {"kind": "carry"}}
    return Trainer(tiny("passkey", tmp_path / "run", **how, **changes), quiet=True)


@pytest.mark.parametrize("why", ["spike", "nonfinite"])
def test_no_state_is_carried_into_another_document(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream in which a document begins in batches that are left out continues from zero."""
    factor, changes = (1e4, ROLLBACK) if why == "spike" else (math.inf, {"nonfinite": "skip"})
    scale_loss(monkeypatch, {6}, factor)
    trainer = packed_stream(tmp_path, save_steps=4, **changes)
    begun: list[torch.Tensor] = []
    before = trainer.starts.before

    def recorded(batch: Batch, step: int, micro: int) -> Any:
        state = before(batch, step, micro)
        begun[step:] = [state.position]
        return state

    monkeypatch.setattr(trainer.starts, "before", recorded)
    trainer.train()
    left_out = range(4, 7) if why == "spike" else range(6, 7)
    begins = trainer.source.begins(left_out, 0)
    assert begins.any()
    assert not begun[7][begins].any()


def test_a_checkpoint_that_always_leads_to_a_spike_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stops after MOST_ROLLBACKS rollbacks to one checkpoint."""
    scale_loss(monkeypatch, set(range(6, 100)))
    with pytest.raises(UserError, match=naming(MOST_ROLLBACKS, "checkpoint-00000004")):
        train(tiny("passkey", tmp_path, **ROLLBACK))
    assert checkpoint.checkpoints(tmp_path)[-1].name == "checkpoint-00000004"


def test_without_a_checkpoint_a_spike_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to roll back to before the first checkpoint."""
    scale_loss(monkeypatch, {2})
    with pytest.raises(UserError, match="step 3"):
        train(tiny("passkey", tmp_path, **ROLLBACK))


def test_the_reference_is_the_lowest_running_median(tmp_path: Path) -> None:
    """A slow rise is a spike in the end; a solved task may have a batch of many times its loss."""
    guard = SpikeGuard(tiny("passkey", tmp_path, spike_threshold=4.0), 256)
    assert not guard.is_spike(1e9), "nothing is known of the first step"
    for loss in (5.5, 3.0, 2.0, 2.0, 2.1):
        guard.record(loss)
    assert not guard.is_spike(7.9)
    assert guard.is_spike(8.5)
    for loss in [2.0 * 1.02**n for n in range(60)]:
        guard.record(loss)
    assert guard.is_spike(8.5), "the median has grown, the lowest has not"
    for loss in [1e-3] * 60:
        guard.record(loss)
    assert not guard.is_spike(0.7 * 4 * 0.2 * math.log(256))
    assert guard.is_spike(4 * 0.2 * math.log(256) + 0.1)
