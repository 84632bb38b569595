"""Interleaved timing, and results files that record hardware, versions and command."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from longrnn.programs import module_command, module_environment


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--threads`, which `use_threads` applies."""
    parser.add_argument(
        "--threads",
        type=int,
        help="threads of torch (default: all cores); with 1, CPU time is measured instead of wall "
        "time, which is less affected by other processes",
    )


def use_threads(args: argparse.Namespace) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)


def in_a_process(module: str, *arguments: str) -> Any:
    """Runs a module in a separate process and returns the parsed JSON of its last output line."""
    done = subprocess.run(
        module_command(module, *arguments),
        env=module_environment(module),
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def clock() -> float:
    """Returns wall time in seconds, or the CPU time of this process if torch has one thread."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    repeats: int,
    *,
    warm: bool = False,
    timers: Mapping[str, Callable[[], float]] | None = None,
) -> dict[str, float]:
    """Returns the median seconds of each call; calls alternate so that noise affects all equally.

    Args:
        calls: functions to time, by name.
        repeats: number of measurements of each function.
        warm: whether every function has run before; otherwise each first runs once untimed.
        timers: functions that measure themselves and return seconds, by name.
    """
    timers = timers or {}
    if not warm:
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in (*calls, *timers)}
    for _ in range(repeats):
        for name, call in calls.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
        for name, timer in timers.items():
            seconds[name].append(timer())
    return {name: median(values) for name, values in seconds.items()}


def cpu_model() -> str:
    """Returns the model name of the CPU, or an empty string if it is unknown."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def write_json(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes the results with library versions, CPU, threads, date and command."""
    versions = {}
    for package in ("torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    where = {
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**figures, **versions, **where}, indent=2) + "\n")


def _module() -> str:
    here = Path(__file__).resolve().parent.parent
    return ".".join(Path(sys.argv[0]).resolve().relative_to(here).with_suffix("").parts)
