"""`longrnn report --baseline` compares runs that differ in one key."""

import shutil
from pathlib import Path

from tests.cli.conftest import CLI, refused
from tests.training.runs import metrics, tiny, train


def test_runs_are_paired_with_those_of_the_baseline(cli: CLI) -> None:
    """By all other settings, the seed included; two runs with its value are not a pair."""
    ends: dict[float, list[float]] = {1e-3: [], 2e-3: []}
    for seed in range(3):
        for rate, losses in ends.items():
            folder = Path(f"runs/{rate}-{seed}")
            train(tiny("reverse", folder, max_steps=2, learning_rate=rate, seed=seed))
            losses.append(metrics(folder)[-1]["loss"])
    table = cli("report", *Path("runs").iterdir(), "--baseline", "learning_rate=1e-3")
    assert table.code == 0, table.err
    assert "loss, difference from learning_rate=1e-3" in table.out
    row = next(line for line in table.out.splitlines() if "learning_rate=0.002 | 3 |" in line)
    mean = sum(b - a for a, b in zip(*ends.values(), strict=True)) / 3
    assert f"{mean:+.4g}".replace("-", "−") in row
    shutil.copytree("runs/0.001-0", "copy")
    equal = ["runs/0.001-0", "copy", "--baseline"]
    for baseline, says in (("learning_rate=1e-3", "no two runs"), ("seed=9", "seed")):
        refused(cli, "report", *equal, baseline, says=(says,))
