"""The default number of threads of a command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from longrnn.threads import limit_threads, usable_cores

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, CORES),
        ({"cpu.max": "max 100000\n"}, CORES),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "640000000 100000\n"}, CORES),
        ({"cpu.max": "nonsense"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "90000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
    ids=str,
)
def test_a_cpu_quota_limits_the_usable_cores(
    files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == expected


def test_a_number_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    chosen, free, whole = {"OMP_NUM_THREADS": "3"}, {}, {}
    limit_threads(chosen, 2)
    limit_threads(free, 2)
    limit_threads(whole, 8)
    assert (chosen, free, whole) == ({"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "2"}, {})
