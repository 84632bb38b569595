"""How many threads a command uses by default."""

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "OMP_NUM_THREADS"  # read by torch and by the C++ kernels when they are loaded
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = QUOTA) -> int:
    """The cores that this process may use: those it is bound to, and no more than its CPU quota.

    A container may have a quota of two cores on a machine with 64.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        time, period = quota.read_text().split()
        return max(1, min(bound or 1, math.ceil(int(time) / int(period))))
    except (OSError, ValueError):  # no quota, or a system that describes it in another way
        return bound or 1


def limit_threads(environment: MutableMapping[str, str], cores: int) -> None:
    """Makes torch start one thread per usable core, unless the user has chosen a number.

    By default torch starts one per core of the machine, and with more threads than usable cores
    every parallel operation waits for threads that are not running.
    """
    if VARIABLE not in environment and cores < (os.cpu_count() or 1):
        environment[VARIABLE] = str(cores)
