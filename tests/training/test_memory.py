"""2,000 steps: no step costs more memory or time than an early one."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from tests.training.forks import Fork, rows
from tests.training.runs import tiny, write_config


def resident(process: Fork) -> float:
    """Resident memory of a process, in MiB."""
    lines = Path(f"/proc/{process.process.pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
@pytest.mark.parametrize("kind", ["carry", "reverse"])
def test_memory_and_time_stay_flat(kind: str, tmp_path: Path) -> None:
    """Graphs kept alive by carried states, metrics that pile up, checkpoints that are not freed."""
    changes = {"max_steps": 2000, "logging_steps": 10, "save_steps": 100}
    output = tmp_path / "run"
    path = write_config(tiny(kind, output, **changes), tmp_path / "config.yaml")
    process = Fork("train", path, "--quiet", folder=tmp_path / "log")
    assert process.when(lambda: rows(output) >= 20, limit=600, every=0.02)
    early = resident(process)
    assert process.when(lambda: rows(output) >= 199, limit=1800, every=0.02)
    late = resident(process)
    assert process.end() == 0
    logged = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    # The rate is that of the last step before each row; rows of one task are of one length, or of
    # lengths drawn from one distribution.
    first = median(row["tokens_per_second"] for row in logged[20:80])
    last = median(row["tokens_per_second"] for row in logged[-60:])
    print(f"{kind}: {early:.1f} MiB, then {late:.1f} MiB; {first:,.0f}, then {last:,.0f} tokens/s")
    assert late - early < 4
    assert last > 0.6 * first
