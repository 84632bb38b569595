"""2,000 steps: no step costs more memory or time than an early one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.training.forks import Fork, rows
from tests.training.runs import tiny, write_config


def resident(process: Fork) -> float:
    """Resident memory of a process, in MiB."""
    pages = Path(f"/proc/{process.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


def processor_time(process: Fork) -> float:
    """Seconds of a processor that a process has used; other work on the machine hardly counts."""
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs /proc")
@pytest.mark.parametrize("kind", ["carry", "reverse"])
def test_memory_and_time_stay_flat(kind: str, tmp_path: Path) -> None:
    """Memory and time per step do not grow over a run."""
    changes = {"max_steps": 2000, "logging_steps": 10, "save_steps": 100}
    output = tmp_path / "run"
    path = write_config(tiny(kind, output, **changes), tmp_path / "config.yaml")
    process = Fork("train", path, "--quiet", folder=tmp_path / "log")
    memory, seconds = {}, {}
    for step in (200, 700, 1490, 1990):
        assert process.when(lambda s=step: rows(output) >= s / 10, limit=1800, every=0.01)
        memory[step], seconds[step] = resident(process), processor_time(process)
    assert process.end() == 0
    first, last = seconds[700] - seconds[200], seconds[1990] - seconds[1490]
    print(
        f"{kind}: {memory[200]:.1f} MiB after 200 steps and {memory[1990]:.1f} MiB after 1,990; "
        f"{first * 2:.2f} ms of processor time a step at first and {last * 2:.2f} ms at last"
    )
    assert memory[1990] - memory[200] < 4
    assert last < 1.5 * first
