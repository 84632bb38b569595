"""`longrnn train` killed, terminated, interrupted and out of disk, each in a process of its own."""

from __future__ import annotations

import random
import resource
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from longrnn.training import checkpoint
from tests.training.forks import Fork, kill_at_random, pair, rows, run
from tests.training.runs import (
    assert_same_run,
    last_checkpoint,
    metrics,
    signal_after,
    start,
    tiny,
    train,
    write_config,
)

pytestmark = pytest.mark.core

# Many steps and checkpoints, so that a signal falls anywhere within them.
LONG: dict[str, dict[str, Any]] = {
    "reverse": {"max_steps": 200, "save_steps": 20, "logging_steps": 5, "length": {"max": 6}},
    "carry": {"max_steps": 60, "save_steps": 5, "logging_steps": 3},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same runs, left alone."""
    root = tmp_path_factory.mktemp("undisturbed")
    for kind, changes in LONG.items():
        train(tiny(kind, root / kind, **changes))
    return {kind: root / kind for kind in LONG}


def prepare(kind: str, folder: Path, **changes: Any) -> tuple[Path, Path]:
    """The output folder of a long run, and its configuration file."""
    output = folder / "run"
    config = tiny(kind, output, **{**LONG[kind], **changes})
    return output, write_config(config, folder / "config.yaml")


def finish(path: Path, folder: Path) -> None:
    """The same command with --resume, to its end."""
    last = Fork("train", path, "--quiet", "--resume", folder=folder)
    assert last.end() == 0, last.err
    assert last.err == ""


@pytest.mark.parametrize("kind", LONG)
def test_killed_and_resumed(kind: str, tmp_path: Path, undisturbed: dict[str, Path]) -> None:
    """After SIGKILL, the resumed run ends bit for bit where an undisturbed one does."""
    output, path = prepare(kind, tmp_path)
    rng = random.Random(kind)
    process = Fork("train", path, "--quiet", folder=tmp_path / "log")
    for _ in range(2):
        kill_at_random(process, rng, output, most=15)
        assert not (output / "model.safetensors").exists()
        process = Fork("train", path, "--quiet", "--resume", folder=tmp_path / "log")
    assert process.end() == 0, process.err
    assert process.out.startswith(f"{output}: ")
    assert_same_run(undisturbed[kind], output)
    assert not list(output.glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", LONG)
def test_killed_again_and_again(kind: str, tmp_path: Path, undisturbed: dict[str, Path]) -> None:
    """30 kills, half of them while a checkpoint is written, do not change the final model."""
    output, path = prepare(kind, tmp_path)
    rng = random.Random(kind)
    saved, seen = 0, Counter[str]()
    process = Fork("train", path, "save_steps=1", "--quiet", folder=tmp_path / "log")

    def writing() -> bool:
        return any(output.glob(".checkpoint-*.partial")) if output.is_dir() else False

    while seen["kills"] < 30:
        if seen["kills"] % 2:
            # Where one write is killed at once, the next is killed in its middle or near its end.
            assert process.when(writing), process.err
            process.process.join(rng.choice([0.0, 0.001, 0.003, 0.01]))
            process.send(signal.SIGKILL)
            assert process.end() == -signal.SIGKILL
        else:
            kill_at_random(process, rng, output, most=min(rows(output) + 1, 18))
        seen["kills"] += 1
        seen["left a half-written checkpoint"] += writing()
        whole, damaged = checkpoint.newest_whole(output)
        assert not damaged
        assert (checkpoint.steps(whole) if whole else 0) >= saved, "what was saved is lost"
        saved = checkpoint.steps(whole) if whole else 0
        seen["steps saved"] = saved
        arguments = ["train", path, "save_steps=1", "--quiet", "--resume"]
        process = Fork(*arguments, folder=tmp_path / "log")
    assert process.end() == 0, process.err
    print(kind, dict(seen))
    assert seen["left a half-written checkpoint"] >= 10
    assert_same_run(undisturbed[kind], output)
    assert not list(output.glob(".*"))


def test_interrupted_and_resumed(tmp_path: Path, undisturbed: dict[str, Path]) -> None:
    """Ctrl-C finishes and saves the current step."""
    output, path = prepare("reverse", tmp_path)
    process = start("train", path, "save_steps=1000", "--quiet")
    signal_after(process, output / "metrics.jsonl", signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert not out
    again = f"longrnn train {path} save_steps=1000 --quiet --resume"
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(again)
    step = checkpoint.steps(last_checkpoint(output))
    assert step >= metrics(output)[-1]["step"] > 0
    assert step < 200
    finished = run(*again.split()[1:])
    assert finished.returncode == 0, finished.stderr
    assert_same_run(undisturbed["reverse"], output)


def test_terminated_and_resumed(tmp_path: Path, undisturbed: dict[str, Path]) -> None:
    """SIGTERM saves and ends the run, before the first step, within a step and while saving."""
    output, path = prepare("carry", tmp_path)
    again = f"longrnn train {path} --quiet --resume"

    def terminate(process: Fork) -> str:
        process.send(signal.SIGTERM)
        assert process.end() == 0, process.err
        assert process.err == ""
        (line,) = process.out.splitlines()
        assert line.endswith(again)
        return line

    process = Fork("train", path, "--quiet", folder=tmp_path / "log")
    assert process.when((output / "train.yaml").exists)
    terminate(process)
    process = Fork("train", path, "--quiet", "--resume", folder=tmp_path / "log")
    assert process.when((output / "metrics.jsonl").exists)
    line = terminate(process)
    step = checkpoint.steps(last_checkpoint(output))
    assert f"{output}: step {step} " in line
    assert step >= metrics(output)[-1]["step"] > 0
    process = Fork("train", path, "--quiet", "--resume", folder=tmp_path / "log")
    assert process.when(lambda: any(output.glob(".checkpoint-*.partial")))
    terminate(process)
    assert step < checkpoint.steps(last_checkpoint(output)) < 60
    finish(path, tmp_path / "log")
    assert_same_run(undisturbed["carry"], output)


def test_two_processes_stop_after_the_same_step(tmp_path: Path) -> None:
    """If one process gets SIGTERM, both stop after the same step."""
    paths = {}
    for name in ("undisturbed", "terminated"):
        (tmp_path / name).mkdir()
        changes = {"num_processes": 2, "max_steps": 40, "save_steps": 1000}
        _, paths[name] = prepare("carry", tmp_path / name, **changes)
    whole = pair("train", paths["undisturbed"], "--quiet", folder=tmp_path / "log/0")
    assert [process.end() for process in whole] == [0, 0], whole[0].err
    output = tmp_path / "terminated/run"
    both = pair("train", paths["terminated"], "--quiet", folder=tmp_path / "log/1")
    assert both[0].when((output / "metrics.jsonl").exists)
    both[1].send(signal.SIGTERM)
    assert [process.end() for process in both] == [0, 0], both[0].err + both[1].err
    (folder,) = checkpoint.checkpoints(output)
    assert checkpoint.processes(folder) == 2
    again = f"accelerate launch … -m longrnn.cli train {paths['terminated']} --quiet --resume"
    step = checkpoint.steps(folder)
    said = f"terminated; {output}: step {step} is done and saved; go on with: {again}\n"
    assert [process.out for process in both] == [said, ""]
    assert 0 < step < 40
    both = pair("train", paths["terminated"], "--quiet", "--resume", folder=tmp_path / "log/2")
    assert [process.end() for process in both] == [0, 0], both[0].err + both[1].err
    assert_same_run(tmp_path / "undisturbed/run", output)


def fill_disk(process: Fork, size: int) -> None:
    """Limits the files of a running process to `size` bytes, as on a full disk."""
    assert process.process.pid is not None
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("full", ["in a row of metrics", "in a checkpoint"])
def test_a_full_disk_loses_nothing(full: str, tmp_path: Path, undisturbed: dict[str, Path]) -> None:
    """When the disk fills up, saved checkpoints stay and the run resumes from them."""
    output, path = prepare("reverse", tmp_path)
    process = Fork("train", path, "--quiet", folder=tmp_path / "log")
    assert process.when((output / "checkpoint-00000040").exists)
    metrics_size = (output / "metrics.jsonl").stat().st_size
    model = (output / "checkpoint-00000040/model.safetensors").stat().st_size
    fill_disk(process, metrics_size + 20 if full == "in a row of metrics" else model - 50)
    assert process.end() == 2
    assert process.out == ""
    (line,) = process.err.splitlines()
    assert line.startswith(f"error: File too large ({output}/")
    assert line.endswith(
        f"free space or choose another folder, then: longrnn train {path} --quiet --resume"
    )
    whole, damaged = checkpoint.newest_whole(output)
    assert whole is not None
    assert checkpoint.steps(whole) >= 40
    assert not damaged
    assert not list(output.glob(".*"))
    finish(path, tmp_path / "log")
    assert_same_run(undisturbed["reverse"], output)


def test_a_disk_that_is_full_for_one_process(tmp_path: Path) -> None:
    """If one process cannot write, all stop and no partial checkpoint is published."""
    changes = {"num_processes": 2, "save_steps": 3, "logging_steps": 1000, "max_steps": 200}
    output, path = prepare("carry", tmp_path, **changes)
    both = pair("train", path, "--quiet", folder=tmp_path / "log")
    assert both[1].when((output / "checkpoint-00000003").exists)
    fill_disk(both[1], (output / "checkpoint-00000003/carry-1.pt").stat().st_size - 50)
    assert [process.end() for process in both] == [2, 2]
    for process in both:
        assert "error: File too large (" in process.err
        assert "carry-1.pt" in process.err
    assert checkpoint.newest_whole(output)[0] is not None
    assert not list(output.glob(".*"))
