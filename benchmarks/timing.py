"""Interleaved timing, and results files that record hardware, versions and command."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from longrnn.ops.cpu import missing


def parser(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """Returns a parser with the options that all benchmarks share.

    It says on standard error if the compiled kernels are missing.
    """
    if (reason := missing()) is not None:
        print(f"note: measuring torch alone; {reason}", file=sys.stderr)
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--cell", help="of the models (default: mamba2), or the only one of layers")
    made.add_argument("--layers", type=int, default=24)
    made.add_argument("--d-model", type=int, default=768)
    made.add_argument("--vocab", type=int, default=50_288)
    made.add_argument("--repeats", type=int, default=repeats)
    made.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="threads of torch; with 1, processor time is measured instead of wall time, which is "
        "less affected by other processes",
    )
    made.add_argument("--json", type=Path, help="also write the results to this file")
    return made


def clock() -> float:
    """Returns wall time in seconds, or the CPU time of this process if torch has one thread.

    Where a GPU is used, wall time after what it has begun.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    repeats: int,
    timers: Mapping[str, Callable[[], float]] | None = None,
) -> dict[str, list[float]]:
    """Returns the seconds of each call; calls alternate so that noise affects all equally.

    Args:
        calls: functions to time, by name; each first runs once untimed.
        repeats: number of measurements of each function.
        timers: functions that measure themselves and return seconds, by name.
    """
    timers = timers or {}
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
    return seconds


def report(title: str, tokens: int, seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Prints one row per call: tokens per second, and the time relative to the first call.

    The relative time is the median over rounds of measurements, in brackets the extremes.
    """
    first = next(iter(seconds))
    n = len(seconds[first])
    print(f"\n{title}, {torch.get_num_threads()} threads, n = {n}")
    print(f"{'':28} tokens/s  time relative to {first} [range]")
    found = {}
    for name, values in seconds.items():
        speed = tokens / median(values)
        ratios = [a / b for a, b in zip(values, seconds[first], strict=True)]
        low, middle, high = min(ratios), median(ratios), max(ratios)
        print(f"{name:28} {speed:8.1f}  {middle:.2f} [{low:.2f}, {high:.2f}]", flush=True)
        found[name] = {"tokens_per_second": speed, "relative_time": [low, middle, high]}
    return found


def write_json(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes the results with library versions, CPU, threads, date and command."""
    where = {
        "torch": version("torch"),
        "transformers": version("transformers"),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.{Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**figures, **where}, indent=2) + "\n")


def cpu_model() -> str:
    """Returns the model name of the CPU, or an empty string if it is unknown."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor()
