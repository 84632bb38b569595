"""How many threads a command uses by default."""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "OMP_NUM_THREADS"  # read by torch and by the C++ kernels when they are loaded
CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = CGROUPS) -> int:
    """The cores that this process may use: those it is bound to, and no more than its CPU quota.

    A container may have a quota of two cores on a machine with 64.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _quota(cgroups)
    return max(1, bound or 1) if quota is None else max(1, min(bound or 1, math.ceil(quota)))


def limit_threads(environment: MutableMapping[str, str], cores: int) -> None:
    """Makes torch start one thread per usable core, unless the user has chosen a number.

    By default torch starts one per core of the machine, and with more threads than usable cores
    every parallel operation waits for threads that are not running.
    """
    if VARIABLE not in environment and cores < (os.cpu_count() or 1):
        environment[VARIABLE] = str(cores)


def _quota(cgroups: Path) -> float | None:
    """The quota of this container in cores; None for no limit or where it is unknown."""
    try:
        # Version 2, then version 1, of the control groups of Linux.
        for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
            if all((cgroups / name).is_file() for name in names):
                quota, period = " ".join((cgroups / name).read_text() for name in names).split()
                return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None  # as on a system that describes its limits in another way
    return None
