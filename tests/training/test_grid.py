"""`longrnn train --grid` and `longrnn report --baseline`."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from longrnn.errors import UserError
from longrnn.training.grid import DIVERGED, grid_of, run_grid
from tests.cli.conftest import CLI, cli, refused  # noqa: F401
from tests.training.runs import metrics, tiny, write_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    linear = {"d_model": 8, "n_layers": 1, "mixer": {"kind": "rnn", "nonlinearity": "identity"}}
    how = {"model": linear, "max_grad_norm": math.inf, "lr_scheduler_type": "constant"}
    made = tiny("reverse", Path("runs"), logging_steps=2, max_steps=6, warmup_steps=0, **how)
    return write_config(made, tmp_path / "grid.yaml")


def test_a_grid_with_a_run_that_diverges(cli: CLI, config: Path) -> None:  # noqa: F811
    """Every combination has its folder; a diverged one is a result; nothing runs twice."""
    command = ["train", config, "--grid", "learning_rate=1e-3,1e30", "seed=0,1,2"]
    done = cli(*command)
    assert done.code == 0, done.err
    folders = sorted(path for path in Path("runs").iterdir() if path.is_dir())
    assert len(folders) == len(done.out.splitlines()) == 6
    bad = [path for path in folders if (path / DIVERGED).is_file()]
    assert {path.name.split(",")[0] for path in bad} == {"learning_rate=1e30"}
    assert len(bad) == 3
    last = sorted(set(folders) - {*bad})[0] / "checksums.json"  # of the final model
    last.unlink()
    assert cli(*command).code == 0
    assert last.is_file()
    refused(cli, *command, "max_steps=7", says=("max_steps: 6 → 7", "output_dir"))
    times = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.*")}
    again = cli(*command)
    assert again.out.count("diverged") == 3
    assert {path: path.stat().st_mtime_ns for path in times} == times
    more = cli(*command[:-2], "learning_rate=1e-3,2e-3", "seed=0,1,2")
    assert more.code == 0, more.err
    table = cli("report", *Path("runs").iterdir(), "--baseline", "learning_rate=1e-3")
    assert table.code == 0, table.err
    assert table.out.count("diverged") >= 3
    assert "loss, difference from learning_rate=1e-3" in table.out
    row = next(
        line for line in table.out.splitlines() if line.startswith("| learning_rate=0.002 | 3 |")
    )
    ends = [
        metrics(Path(f"runs/learning_rate={rate},seed={seed}"))[-1]["loss"]
        for rate in ("2e-3", "1e-3")
        for seed in range(3)
    ]
    mean = sum(a - b for a, b in zip(ends[:3], ends[3:], strict=True)) / 3
    assert f"{mean:+.4g}".replace("-", "−") in row
    refused(cli, "report", *folders[:1], "--baseline", "seed=9", says=("seed",))
    # Two runs with the value of the baseline are not a pair.
    shutil.copytree("runs/learning_rate=1e-3,seed=0", "copy")
    equal = ["runs/learning_rate=1e-3,seed=0", "copy", "--baseline", "learning_rate=1e-3"]
    refused(cli, "report", *equal, says=("no two runs",))


def test_a_launch_of_a_grid_is_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="launch"):
        next(run_grid(config, ["seed=0,1"], quiet=True))


def test_a_grid_of_kinds() -> None:
    """A list of kinds takes the options of each; brackets hold one value together."""
    kinds = ["model.position.kind=none,sinusoidal", "model.mixer.kind=lstm,gru"]
    runs = grid_of("reverse_small", kinds)
    assert [run.model["position"] for run in runs[::2]] == [
        {"kind": "none"},
        {"kind": "sinusoidal", "combine": "concat"},
    ]
    task = "task={kind: copy, vocab_size: 8},{kind: passkey, n_keys: [1, 2], min_segments: 2}"
    assert [run.task["kind"] for run in grid_of("reverse_small", [task])] == ["copy", "passkey"]
    fixed = grid_of("recall_tiny_short", ["task.n_keys=1,[1,2]", "seed=3"])
    assert [run.task["n_keys"] for run in fixed] == [1, [1, 2]]
    assert Path(fixed[0].output_dir).name == "task.n_keys=1"
