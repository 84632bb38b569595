"""The default number of threads of a command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from longrnn.threads import limit_threads, usable_cores

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        (None, CORES),
        ("max 100000\n", CORES),
        ("50000 100000\n", 1),
        ("110000 100000\n", min(CORES or 1, 2)),
        ("640000000 100000\n", CORES),
        ("nonsense", CORES),
    ],
)
def test_a_cpu_quota_limits_the_usable_cores(
    quota: str | None, expected: int, tmp_path: Path
) -> None:
    """Without a quota, and where it cannot be read, all cores are usable."""
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path / "cpu.max") == expected


def test_a_number_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are limited to the usable cores of a machine that has more."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    chosen, free, whole = {"OMP_NUM_THREADS": "3"}, {}, {}
    limit_threads(chosen, 2)
    limit_threads(free, 2)
    limit_threads(whole, 8)
    assert (chosen, free, whole) == ({"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "2"}, {})
