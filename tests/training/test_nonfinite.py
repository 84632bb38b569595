"""A loss or gradient that is NaN or infinite: named, kept for replay, and no step of the run.

The models are made so that one token, and no other, leaves the range of float32 on its way through
a cell: forwards (a NaN) or backwards alone (a gradient that overflows).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load
from longrnn.config import build_config, load_config
from longrnn.errors import Terminated, UserError
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.models.checkpoint import save_model
from longrnn.training import checkpoint, replay
from longrnn.training.config import TrainConfig
from longrnn.training.failures import MOST_SKIPPED
from longrnn.training.trainer import Trainer
from tests.cli.conftest import CLI, cli  # noqa: F401
from tests.refusals import naming
from tests.training.forks import pair
from tests.training.runs import KINDS, MAMBA2, assert_equal, metrics, tiny, train, write_config

TOKEN = 4
RARE = {"length": {"max": 2}, "per_device_train_batch_size": 2, "logging_steps": 1}
PASSKEY_DIGIT = ord("2")


def sick(folder: Path, fault: str, kind: str = "reverse", token: int = TOKEN) -> str:
    """A checkpoint whose model produces values that are not finite for one token."""
    torch.manual_seed(0)
    changes: dict[str, Any] = {"tie_embeddings": False}
    # Without norms, which would make the large numbers small again.
    changes |= {"mixer": MAMBA2["mixer"], "block": "plain"} if fault == "forwards" else {}
    model = RecurrentLM(build_config(RecurrentConfig, {**KINDS[kind]["model"], **changes}))
    with torch.no_grad():
        if fault == "forwards":
            # The recurrence multiplies three numbers of this order.
            model.embedding.weight[token] = 1e20
        else:
            # The product is of order 1; the gradient of the small factor is the large one.
            weight = model.mixers[0].get_parameter("cell.weight_ih_l0")
            weight[:, :16] *= 1e37
            model.embedding.weight.mul_(1e-37)
            assert fault in ("backwards", "norm")
            if fault == "backwards":
                model.head.weight.mul_(1e5)
    save_model(model, folder)
    return str(folder)


def with_token(config: TrainConfig, steps: int) -> list[int]:
    """The steps, counted from 1, whose rows hold the token."""
    from longrnn.tasks import TASKS
    from longrnn.training.data import Source

    source = Source(TASKS.build(config.task, None), config, 0, 1)
    return [s + 1 for s in range(steps) if (source.segments(s, 0)[0].tokens == TOKEN).any()]


def snapshot(trainer: Trainer) -> Any:
    model = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return model, copy.deepcopy(trainer.optimizer.state_dict()["state"])


def assert_identical(one: Any, other: Any) -> None:
    """Bit for bit, a NaN equal to itself."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("fault", "layer", "parameter", "says"),
    [
        ("forwards", "made inside blocks.0.mixer", "embedding.weight", "the loss is nan"),
        ("backwards", None, "embedding.weight", "gradient that is not finite is that of embedding"),
        ("norm", None, "embedding.weight", "norm of the gradient overflows, most in embedding.we"),
    ],
)
def test_a_run_stops_at_the_step_and_says_where(
    fault: str, layer: str | None, parameter: str, says: str, tmp_path: Path
) -> None:
    """The run stops before the weights change, and names the step, the module and the file."""
    start = sick(tmp_path / "sick", fault)
    config = tiny("reverse", tmp_path / "run", init_from=start, save_steps=1, **RARE)
    first = 1 if fault in ("backwards", "norm") else with_token(config, 10)[0]
    trainer = Trainer(config, quiet=True)
    with pytest.raises(UserError) as error:
        trainer.train()
    message, path = str(error.value), tmp_path / f"run/nonfinite-{first:08d}.pt"
    assert "\n" not in message
    if first > 1:
        remedy = f"or move checkpoint-{first - 1:08d}, which holds these weights, out of the folder"
        remedy += " and give --resume and a lower learning_rate=0.001"
    else:  # no step has changed the weights
        remedy = "or begin again in another output_dir from other weights"
    pieces = (f"step {first}: ", says, f"`longrnn replay {path}`", remedy)
    for piece in (*pieces, "with --resume nonfinite=skip"):
        assert piece in message, message
    content = torch.load(path, weights_only=True)
    found = {name: content[name] for name in ("step", "micro_batch", "layer", "parameter")}
    assert found == {"step": first, "micro_batch": 0, "layer": layer, "parameter": parameter}
    batch = trainer.source.segments(first - 1, 0)[0]
    assert_equal(content["segments"][0]["tokens"], batch.tokens)
    # Nothing of the step has reached the weights.
    assert trainer.step == first - 1
    assert_identical(content["model"], dict(trainer.model.state_dict()))


@pytest.mark.parametrize("kind", ["reverse", "carry"])
def test_steps_left_out_leave_nothing_behind(kind: str, tmp_path: Path) -> None:
    """A skipped step changes no weight, optimizer entry or carried state, also after a resume."""
    start = sick(tmp_path / "sick", "forwards", kind, TOKEN if kind == "reverse" else PASSKEY_DIGIT)
    changes: dict[str, Any] = {"init_from": start, "nonfinite": "skip", "logging_steps": 1}
    changes |= RARE if kind == "reverse" else {"gradient_accumulation_steps": 1}
    config = tiny(kind, tmp_path / "run", **changes)
    trainer = Trainer(config, quiet=True)
    whole, left_out = Trainer._train_step, []
    while trainer.step < config.max_steps:
        before = snapshot(trainer)
        if "loss" not in whole(trainer, stop=False):
            left_out.append(trainer.step + 1)
            assert_identical(snapshot(trainer), before)
        assert all(leaf.isfinite().all() for leaf in trainer.starts.content().values())
        trainer.step += 1
    assert 0 < len(left_out) < 10
    assert trainer.skipped == len(left_out)
    # The same as a run of its own, which is stopped and resumed on its way.
    one = tiny(kind, tmp_path / "one", **changes)
    train(one)
    rows = metrics(tmp_path / "one")
    assert [row["step"] for row in rows if "loss" not in row] == left_out
    assert [row["skipped"] for row in rows] == [
        sum(step <= row["step"] for step in left_out) for row in rows
    ]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    kept = [replay.steps(path) for path in replay.files(tmp_path / "one")]
    assert kept == left_out[-config.save_total_limit :]
    weights = checkpoint.read_tensors(tmp_path / "one/checkpoint-00000010/training.pt")["optimizer"]
    assert_identical(weights["state"], trainer.optimizer.state_dict()["state"])
    for folder in checkpoint.checkpoints(tmp_path / "one"):
        done = checkpoint.steps(folder)
        assert done not in left_out or done == config.max_steps, (
            "a checkpoint waits for a whole step"
        )
        counted = checkpoint.read_tensors(folder / "training.pt")["skipped"]
        assert counted == sum(step <= done for step in left_out)


def test_a_run_that_leaves_out_everything_stops(tmp_path: Path) -> None:
    """After MOST_SKIPPED skipped steps in a row, the run stops."""
    start = sick(tmp_path / "sick", "backwards")
    changes = {"init_from": start, "nonfinite": "skip", "max_steps": 100}
    config = tiny("reverse", tmp_path / "run", **RARE, **changes)
    with pytest.raises(UserError, match=naming("step 10", MOST_SKIPPED)):
        train(config)


def test_what_a_user_does_after_a_stop(
    cli: CLI,  # noqa: F811
    tmp_path: Path,
) -> None:
    """After a stop, the run continues with the suggested settings, which are recorded."""
    start = sick(tmp_path / "sick", "forwards")
    config = tiny("reverse", Path("run"), init_from=start, save_steps=1, **RARE)
    first, *others = with_token(config, 10)
    write_config(config, tmp_path / "c.yaml")
    stopped = cli("train", "c.yaml", "--quiet")
    assert stopped.code == 2
    assert stopped.err.startswith(f"error: step {first}: ")
    assert len(stopped.err.splitlines()) == 1
    shown = cli("replay", f"run/nonfinite-{first:08d}.pt")
    assert shown.code == 0
    then, now, *table = shown.out.splitlines()
    assert f"step {first}, micro-batch 0, process 0" in then
    assert now.startswith("now ")
    assert next(line.split()[0] for line in table if "nan" in line).startswith("blocks.0.mixer")
    # Another seed is another run, also now.
    other = cli("train", "c.yaml", "--quiet", "--resume", "seed=1", "learning_rate=1e-3")
    assert (other.code, "seed" in other.err) == (2, True)
    assert "learning_rate" not in other.err
    lower = cli("train", "c.yaml", "--quiet", "--resume", "learning_rate=1e-3")
    assert lower.err.startswith(f"error: step {first}: "), "the fault lies in the weights"
    before = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    final = ["--resume", "learning_rate=1e-4", "nonfinite=skip"]
    assert cli("train", "c.yaml", "--quiet", *final).code == 0
    rows = metrics(tmp_path / "run")
    assert rows[-1]["skipped"] == 1 + len(others)
    assert rows[0]["learning_rate"] == before["learning_rate"]
    (until,) = (tmp_path / "run").glob("train-until-*.yaml")
    assert until.name == f"train-until-{first - 1:08d}.yaml"
    text = until.read_text()
    assert "learning_rate: 0.002" in text, "no step up to there had the rate in between"
    assert rows[first]["learning_rate"] <= 1e-4
    # The run has gone on beyond the step: its configuration is fixed again.
    later = cli("train", "c.yaml", "--quiet", "--resume", "learning_rate=1e-3", "nonfinite=skip")
    assert (later.code, "learning_rate" in later.err) == (2, True)


def test_replay_of_what_is_no_batch(cli: CLI, tmp_path: Path) -> None:  # noqa: F811
    """Replaying another or damaged file is refused in one sentence."""
    torch.save({"format": "other"}, tmp_path / "other.pt")
    (tmp_path / "torn.pt").write_bytes((tmp_path / "other.pt").read_bytes()[:100])
    for name, says in [
        ("other", "is not a batch to replay"),
        ("torn", "damaged"),
        ("x", "missing"),
    ]:
        result = cli("replay", f"{name}.pt")
        assert (result.code, says in result.err) == (2, True)
        assert len(result.err.splitlines()) == 1


def test_replay_begins_from_the_carried_state(tmp_path: Path) -> None:
    """The replay starts from the carried state and gives the same loss."""
    trainer = train(tiny("carry", tmp_path, max_steps=3))
    segments, state = trainer.micro_batch(0)
    objective = trainer.accelerator.unwrap_model(trainer.objective)
    path = tmp_path / "nonfinite-00000004.pt"
    replay.save_failure(trainer.accelerator, objective, [(segments, state)], path)
    content, seen = replay.replay(path)
    assert content["where"]
    assert seen.loss == float(objective(segments, state).loss.detach())
    assert seen.where is None
    assert all(parameter.grad is None for parameter in objective.parameters())


def test_two_processes_handle_nonfinite_the_same_steps(tmp_path: Path) -> None:
    """A NaN in one process makes both skip the step."""
    start = sick(tmp_path / "sick", "forwards")
    changes = {"init_from": start, "nonfinite": "skip", **RARE, "max_steps": 8, "save_steps": 4}
    half = {**changes, "per_device_train_batch_size": 1, "num_processes": 2}
    train(tiny("reverse", tmp_path / "one", **changes))
    path = write_config(tiny("reverse", tmp_path / "two", **half), tmp_path / "c.yaml")
    both = pair("train", path, "--quiet", folder=tmp_path / "log")
    assert [process.end() for process in both] == [0, 0], both[0].err + both[1].err
    rows, expected = metrics(tmp_path / "two"), metrics(tmp_path / "one")
    assert [row.keys() for row in rows] == [row.keys() for row in expected]
    assert rows[-1]["skipped"] == expected[-1]["skipped"] > 0
    for row, wanted in zip(rows, expected, strict=True):
        for name, value in row.items():
            assert value == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name
    lines = both[0].err.splitlines()
    assert len(lines) == rows[-1]["skipped"]
    assert both[1].err == ""
    written = [torch.load(file, weights_only=True) for file in replay.files(tmp_path / "two")]
    assert {content["process"] for content in written} <= {0, 1}


def spoilt_at(
    monkeypatch: pytest.MonkeyPatch, step: int, change: Callable[[Trainer], None]
) -> None:
    """Changes weights or optimizer of every trainer after so many steps, as a bad update would."""
    whole = Trainer._train_step

    def then(self: Trainer, *, stop: bool) -> dict[str, float]:
        values = whole(self, stop=stop)
        if self.step + 1 == step:
            with torch.no_grad():
                change(self)
        return values

    monkeypatch.setattr(Trainer, "_train_step", then)


def failing(trainer: Trainer) -> None:
    """Sets finite weights that fail at every batch."""
    trainer.model.head.weight.fill_(3e38)


def healthy(folder: Path) -> bool:
    """Whether a checkpoint's model has finite logits."""
    with torch.no_grad():
        return bool(load(folder)(torch.arange(8)[None]).logits.isfinite().all())  # type: ignore[operator]


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("save_steps", [1, 3])
def test_weights_that_fail_never_replace_the_last_healthy_checkpoint(
    save_steps: int, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stops after skipped steps is resumed by the remedy that it prints."""
    changes = {"nonfinite": "skip", "max_steps": 30, "logging_steps": 1}
    changes |= {"save_steps": save_steps, "save_total_limit": limit}
    config = tiny("reverse", tmp_path / "run", **changes)
    with monkeypatch.context() as patch:
        spoilt_at(patch, 6, failing)
        with pytest.raises(UserError) as error:
            train(config)
    message = str(error.value)
    left = checkpoint.checkpoints(tmp_path / "run")
    assert left, message
    assert all(healthy(folder) for folder in left)
    assert left[-1].name in message
    assert "checkpoint-00000006.nonfinite" in message
    assert checkpoint.steps(left[-1]) == (5 if save_steps == 1 else 3)
    again = tiny("reverse", tmp_path / "run", **changes, learning_rate=1e-3)
    trainer = train(again, resume=True)
    assert (trainer.step, trainer.skipped) == (30, 0)
    assert len(checkpoint.checkpoints(tmp_path / "run")) == limit


@pytest.mark.parametrize("nonfinite_", ["stop", "skip"])
@pytest.mark.parametrize("part", ["weight", "moment"])
def test_weights_that_are_not_finite_are_never_saved(
    nonfinite_: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that overflows is found before it is saved; the remedy printed works."""

    def overflow(trainer: Trainer) -> None:
        if part == "weight":  # of a token that is in no batch
            trainer.model.embedding.weight[TOKEN, 0] = math.inf  # type: ignore[union-attr]
        else:
            state = trainer.optimizer.state[trainer.model.head.weight]
            state["exp_avg_sq"][0, 0] = math.inf

    changes = {"nonfinite": nonfinite_, "save_steps": 3, "length": {"max": 2}}
    config = tiny("reverse", tmp_path / "run", **changes)
    with monkeypatch.context() as patch:
        spoilt_at(patch, 6, overflow)
        with pytest.raises(UserError) as error:
            train(config)
    said = {"weight": "the weight embedding.weight", "moment": "exp_avg_sq of head.weight"}[part]
    message = str(error.value)
    assert said in message
    assert "--resume" in message
    assert "nonfinite=skip" not in message
    for folder in checkpoint.checkpoints(tmp_path / "run"):
        assert healthy(folder)
    again = tiny("reverse", tmp_path / "run", **changes, learning_rate=1e-3)
    assert train(again, resume=True).step == 10


def test_a_signal_while_steps_are_left_out_removes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved then comes beside the healthy checkpoint, and ten such steps set it aside."""
    changes = {"nonfinite": "skip", "max_steps": 30, "save_steps": 3, "save_total_limit": 1}
    config = tiny("reverse", tmp_path / "run", **changes)
    whole = Trainer._train_step

    def stopped(self: Trainer, *, stop: bool) -> dict[str, float]:
        return whole(self, stop=self.step == 7)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", stopped)
        spoilt_at(patch, 5, failing)
        with pytest.raises(Terminated):
            train(config)
    names = [folder.name for folder in checkpoint.checkpoints(tmp_path / "run")]
    assert names == ["checkpoint-00000003", "checkpoint-00000008"]
    with pytest.raises(UserError, match=naming("step 15", "checkpoint-00000008.nonfinite")):
        train(config, resume=True)
    again = tiny("reverse", tmp_path / "run", **changes, learning_rate=1e-3)
    assert train(again, resume=True).step == 30


def test_clipping_stops_an_explosion_that_ends_the_run_without_it(tmp_path: Path) -> None:
    """`exploding_rnn.yaml` stops at a gradient that overflows, and with clipping it does not."""
    path = Path(__file__).parents[2] / "configs/train/exploding_rnn.yaml"
    run, clipped = (f"output_dir={tmp_path / name}" for name in ("run", "clipped"))
    weight = "blocks.0.mixer.cell.weight_hh_l0"
    with pytest.raises(UserError, match=naming(weight)):
        train(load_config(TrainConfig, path, [run, "max_steps=20"]))
    (kept,) = replay.files(tmp_path / "run")
    assert kept.name == "nonfinite-00000004.pt"
    train(load_config(TrainConfig, path, [clipped, "max_steps=20", "max_grad_norm=1.0"]))
    assert [row["step"] for row in metrics(tmp_path / "clipped")] == [20]
    assert replay.files(tmp_path / "clipped") == []
