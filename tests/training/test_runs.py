"""Runs and their folders: exact resuming, branches, signals, kills, and what is refused."""

import random
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch

from longrnn import files, load, train
from longrnn.checksums import write_checksums
from longrnn.errors import UserError
from longrnn.training import checkpoint
from longrnn.training.train import resumed
from longrnn.training.trainer import Trainer
from tests.cli.conftest import contents
from tests.refusals import naming
from tests.texts import TEXTS
from tests.training import forks
from tests.training.forks import Fork, kill_at_random
from tests.training.runs import (
    KINDS,
    assert_same_run,
    crash,
    last_checkpoint,
    metrics,
    tiny,
    write_config,
)
from tests.training.runs import train as run


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_resumed_run_is_the_undisturbed_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny(kind, tmp_path / "one"))
    broken = tiny(kind, tmp_path / "two")
    crash(broken, 2, monkeypatch)  # before the first checkpoint
    crash(broken, 6, monkeypatch, resume=True)
    assert [row["step"] for row in metrics(tmp_path / "two") if "loss" in row] == [3, 6]
    done = run(broken, resume=True)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    assert done.model().fingerprint() == load(tmp_path / "one").fingerprint()
    assert done.last("loss") == metrics(tmp_path / "one")[-1].get("loss", done.last("loss"))


def test_a_thread_may_train(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, tiny("reverse", tmp_path)).result().rows[-1]["step"] == 10


REPEATED = {"kind": "passkey", "min_segments": 3, "max_segments": 3, "max_repeat": 50}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("streams", {"segments_per_step": "all"}),
        ("carry", {"segments_per_step": 2, "task": REPEATED}),
    ],
)
def test_recomputed_activations_have_the_same_bits(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Weights, optimizer, carried states and metrics do not change."""
    how: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 8, **changes}
    run(tiny(kind, tmp_path / "no", **how))
    for name in ("block", "segment"):
        run(tiny(kind, tmp_path / name, **how, gradient_checkpointing=name))
        assert_same_run(tmp_path / "no", tmp_path / name)


def test_a_longer_run_and_a_branch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`resume` prints what changed, once; a checkpoint of another run is continued elsewhere."""
    constant = {"lr_scheduler_type": "constant", "save_total_limit": 5}
    run(tiny("streams", tmp_path / "one", **constant))
    run(tiny("streams", tmp_path / "two", **constant, max_steps=6))
    train(None, "max_steps=10", resume=tmp_path / "two", quiet=False)
    assert "max_steps: 6 → 10" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    resumed(tmp_path / "two", ["max_steps=11"], quiet=False)
    assert not capsys.readouterr().err
    monkeypatch.delenv("RANK")
    weights = [load(tmp_path / name).fingerprint() for name in ("one", "two")]
    assert weights[0] == weights[1]
    origin = tmp_path / "one/checkpoint-00000004"
    branch = train(None, f"output_dir={tmp_path / 'three'}", resume=origin)
    assert branch.model().fingerprint() == weights[0]
    assert [row["step"] for row in branch.rows] == [3, 6, 9, 10]
    for step, place in ((10, origin.with_name("checkpoint-00000010")), (4, origin)):
        done = train(None, f"output_dir={tmp_path / place.name}", f"max_steps={step}", resume=place)
        assert metrics(done.folder)[:-1] == metrics(tmp_path / "one")[: len(done.rows) - 1]
        assert done.rows[-1]["step"] == step
    still = ["weight_decay=0.5", "max_steps=5", "learning_rate_scale={'*.A_log': 1e-9}"]
    branch = train(None, f"output_dir={tmp_path / 'still'}", *still, resume=origin)
    base, tuned = (model.state_dict() for model in (load(origin), branch.model()))
    moved = {name for name in tuned if (tuned[name] - base[name]).abs().max() > 1e-6}
    assert moved == {name for name in tuned if not name.endswith("A_log")}
    with pytest.raises(UserError, match=naming("resume")):
        train({"max_steps": 11}, resume=tmp_path / "one")


def test_the_speed_is_that_of_the_steps_since_the_previous_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps that take 1, 2, 3, 4 and 5 seconds for 128 tokens each; saving does not count."""
    clock = [0.0]
    for name, seconds in (("train_step", 1), ("_save", 100)):
        whole = getattr(Trainer, name)

        def slow(self: Trainer, whole: Any = whole, n: int = seconds, **given: Any) -> Any:
            clock[0] += n * (1 + self.step)
            return whole(self, **given)

        monkeypatch.setattr(Trainer, name, slow)
    monkeypatch.setattr("longrnn.training.trainer.time", Mock(monotonic=lambda: clock[0]))
    rows = run(tiny("pass", tmp_path / "run", max_steps=5, save_steps=1)).rows
    assert [row["tokens_per_second"] for row in rows] == [3 * 128 / 6, 2 * 128 / 9]


def test_states_of_other_rows_are_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny("streams", tmp_path / "run", max_steps=1))
    others = ["per_device_train_batch_size=3", "initial_state.kind=fitted_noise", "seed=3"]
    for step, change in enumerate([*others, "mitigation=sliding_window(window=4)"], 2):
        done = train(None, f"max_steps={step}", change, resume=tmp_path / "run", quiet=False)
        assert (done.rows[-1]["step"], "states" in capsys.readouterr().err) == (step, True)


@pytest.mark.parametrize("name", ["training.pt", "carry-0.pt"])
def test_a_checkpoint_that_lacks_what_a_run_remembers_is_refused(name: str, tmp_path: Path) -> None:
    """Although its checksums are those of its files, and whatever is missing or of another kind."""
    config = tiny("pass", tmp_path / "run", max_steps=1, save_steps=1)
    run(config)
    path = last_checkpoint(tmp_path / "run") / name
    content = checkpoint.read_tensors(path)
    parts: dict[str, Any] = content["optimizer"] if name == "training.pt" else content
    first = next(iter(parts))
    changes: list[Any] = [{}, {first: {}}, {first: 3}, {"x": parts[first]}]
    changes += [{first: {key: tensor[:0] for key, tensor in parts[first].items() if tensor.ndim}}]
    for change in changes:
        torch.save(content | {"optimizer": change} if parts is not content else change, path)
        write_checksums(path.parent, ("*",))
        with pytest.raises(UserError, match=naming(path.parent)):
            run(config, resume=True)


def test_checkpoints(tmp_path: Path) -> None:
    """The newest are kept; without a damaged one, which is named, the run goes on."""
    folder = tmp_path / "run"
    run(tiny("fitted_noise", folder, save_steps=2, logging_steps=1))
    assert [path.name[-2:] for path in checkpoint.checkpoints(folder)] == ["08", "10"]
    assert load(folder).fingerprint() == load(last_checkpoint(folder)).fingerprint()
    whole = metrics(folder)
    weights = last_checkpoint(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    for place, where in ((folder, []), (weights.parent, [f"output_dir={tmp_path / 'two'}"])):
        with pytest.raises(UserError, match=naming("checkpoint-00000010", "model.safetensors")):
            train(None, *where, resume=place)
    shutil.rmtree(weights.parent)
    train(None, resume=folder)
    assert metrics(folder) == whole


@pytest.mark.parametrize("begins", ["anew", "init_from"])
def test_weights_of_a_checkpoint_are_hashed_and_read_once(
    begins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the run that continues from it, and hashed by each save."""
    how = {"init_from": str(run(tiny("reverse", tmp_path / "base", max_steps=1)).folder)}
    run(tiny("reverse", tmp_path / "run", **(how if begins == "init_from" else {}), max_steps=1))
    calls = []
    for module, name in ((files, "sha256"), (huggingface_hub, "load_state_dict_from_file")):
        calls.append(Mock(wraps=getattr(module, name)))
        monkeypatch.setattr(module, name, calls[-1])
    train(None, "max_steps=2", resume=tmp_path / "run")
    found = [
        sum(Path(call.args[0]).match("*checkpoint*/*.safetensors") for call in each.call_args_list)
        for each in calls
    ]
    assert found == [2, 1]  # hashed by the resumed run and by its save


def test_a_run_can_be_moved_and_its_data_may_not_change(tmp_path: Path) -> None:
    """A folder is all that resuming needs, beside the data, whose content is checked."""
    text = tmp_path / "book.txt"
    text.write_text(Path(TEXTS[0]).read_text())
    run(tiny("streams", tmp_path / "one", task={"kind": "text", "data": str(text)}, max_steps=4))
    (tmp_path / "one").rename(tmp_path / "two")
    assert train(None, "max_steps=5", resume=tmp_path / "two").rows[-1]["step"] == 5
    text.write_text(Path(TEXTS[1]).read_text())
    with pytest.raises(UserError, match=naming("data", "init_from")):
        train(None, "max_steps=6", resume=tmp_path / "two")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_and_saves_it(number: signal.Signals, tmp_path: Path) -> None:
    long = {"max_steps": 60, "save_steps": 30, "logging_steps": 1}
    run(tiny("reverse", tmp_path / "one", **long))
    path = write_config(tiny("reverse", tmp_path / "two", **long), tmp_path / "config.yaml")
    process = Fork("train", path, folder=tmp_path / "log")
    assert process.when(lambda: forks.rows(tmp_path / "two") >= 3)
    process.send(number)
    assert process.end() == (0 if number == signal.SIGTERM else 130), process.err
    assert f"longrnn train --resume {tmp_path / 'two'}" in process.out + process.err
    assert last_checkpoint(tmp_path / "two").is_dir()
    train(None, resume=tmp_path / "two")
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]
)
def test_a_run_survives_kills(seed: int, tmp_path: Path) -> None:
    rng, kind = random.Random(seed), random.Random(seed).choice(sorted(KINDS))
    many = {"max_steps": 30, "save_steps": 2, "logging_steps": 1, "eval_steps": 7}
    run(tiny(kind, tmp_path / "one", **many))
    folder = tmp_path / "two"
    path = write_config(tiny(kind, folder, **many), tmp_path / "config.yaml")
    for number in range(3):
        begun = (folder / "train.yaml").exists()
        command = ("train", "--resume", folder) if begun else ("train", path)
        process = Fork(*command, folder=tmp_path / f"log{number}")
        kill_at_random(process, rng, folder, 20)
    done = forks.run("train", "--resume", folder)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "one", folder)
    assert not list(folder.glob(".checkpoint-*"))


def test_the_dry_run_writes_nothing(tmp_path: Path) -> None:
    path = write_config(tiny("fitted_noise", tmp_path / "run"), tmp_path / "config.yaml")
    done = forks.run("train", path, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert re.search(r"GiB.* tokens/s; 10 steps take about \d\d:\d\d ", done.stdout)
    assert not (tmp_path / "run").exists()
    done = forks.run("train", path, "--dry-run", "validation.data=nowhere.txt")
    assert (done.returncode, "nowhere.txt" in done.stderr) == (2, True)
    run(tiny("fitted_noise", tmp_path / "run", max_steps=1))
    kept = contents(tmp_path)
    done = forks.run("train", "--resume", tmp_path / "run", "max_steps=2", "--dry-run")
    assert (done.returncode, contents(tmp_path)) == (0, kept), done.stderr


def test_the_end_of_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    run(tiny("reverse", tmp_path / "run", report_to="tensorboard"))
    assert list((tmp_path / "run").rglob("events.*"))
    with pytest.raises(UserError, match=naming("report_to")):
        run(tiny("reverse", tmp_path / "other", report_to="mlflow"))
    monkeypatch.setattr("accelerate.Accelerator.init_trackers", lambda *_, **__: 1 / 0)
    with pytest.raises(UserError, match=naming("tensorboard", "division by zero", "--resume")):
        run(tiny("reverse", tmp_path / "third", report_to="tensorboard"))
