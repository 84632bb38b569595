"""Correctness, speed and memory of longrnn on one GPU, in under nine minutes.

Parts, in this order:
  ceilings     how fast the device copies memory and multiplies matrices
  correctness  recurrences, models and mitigations against float64, the CPU and themselves
  kernels      each operation at 65,536 tokens of mamba2-2.7b
  mamba_ssm    the recurrence beside that of mamba-ssm, where it is installed
  model        prefill and decoding of a 2.7B model with random weights in bfloat16
  training     a training step of 8 × 8,192 tokens

Each part runs in its own process, which is ended after the part's budget; what it found until then
counts. If a kernel leaves the device unusable, another process goes on behind it. Results are
written to --json after every row. A bound is what the bytes and operations of a shape need at the
measured ceilings. The exit code is 1 if a check failed or a part ended early, 2 without a GPU.
Products of float32 matrices are computed in float32, whatever the environment says of TF32.

--dry-run runs every part at a tiny size on the CPU, in one process and without any time.

Example:
    python -m benchmarks.gpu --json gpu.json
    python -m benchmarks.gpu --parts correctness kernels --json gpu.json
    python -m benchmarks.gpu --dry-run
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.harness import Bench, DeviceLostError
from benchmarks.gpu.record import FAILED, HEADER, Record, Row
from benchmarks.gpu.sizes import DRY, FULL
from longrnn.programs import module_command, module_environment


class Part(NamedTuple):
    """A part: what it runs, and its budget in seconds, the start of its process included."""

    run: Callable[[Bench], None]
    seconds: float


def _imported(module: str) -> Callable[[Bench], None]:
    """`run` of a module, which is imported when it is called: each process needs one part."""
    return lambda bench: import_module(f"benchmarks.gpu.{module}").run(bench)


PARTS = {
    "ceilings": Part(_imported("ceilings"), 30),
    "correctness": Part(_imported("correctness"), 125),
    "kernels": Part(_imported("kernels"), 80),
    "mamba_ssm": Part(_imported("peer"), 85),
    "model": Part(_imported("language_model"), 115),
    "training": Part(_imported("training_step"), 85),
}
# Seconds before the end of its budget at which a part starts nothing more.
RESERVE = 5.0
# Seconds that another process of a part must have.
RESTART = 20.0
# Exit code of a process that cannot use the device any more.
LOST = 3
PACKAGES = ("torch", "triton", "mamba-ssm", "causal-conv1d", "longrnn")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="run only these parts"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes on the CPU, no times: does it run?"
    )
    # Used by the processes of the parts.
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    # Bounds need the ceilings.
    args.parts = [name for name in PARTS if name in {"ceilings", *args.parts}]
    return args


def about(*, dry: bool) -> dict[str, Any]:
    """Device, versions, command and date."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        "python": platform.python_version(),
        **versions,
    }
    if dry:
        return {"device": "a dry run on the CPU", **found}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        **found,
    }


def run_part(name: str, record: Record, *, dry: bool, seconds: float) -> None:
    """Runs one part in this process, which may take `seconds`."""
    torch.set_float32_matmul_precision("highest")
    device = torch.device("cpu" if dry else "cuda")
    deadline = time.monotonic() + seconds - RESERVE
    PARTS[name].run(Bench(record, name, DRY if dry else FULL, device, deadline))


def run_child(
    name: str, record: Record, *, dry: bool = False, seconds: float | None = None
) -> None:
    """Runs one part in a process of its own, and reads what it found.

    A kernel with a wrong address leaves no usable device behind, and one that never ends cannot be
    interrupted from within. After the first kind, or if the process dies, another one runs the rest
    of the part.

    Args:
        name: of the part.
        record: with a file, through which the process returns its rows.
        dry: whether the process makes a dry run.
        seconds: instead of the part's budget.
    """
    assert record.path is not None
    seconds = PARTS[name].seconds if seconds is None else seconds
    until = time.time() + seconds
    while True:
        begun = len(record.begun)
        code = _process(name, record, until, dry=dry)
        goes_on = len(record.begun) > begun and until - time.time() > RESTART
        reason = ""
        if code is None:
            reason = f"it did not end within its {seconds:.0f} s"
        elif code not in (0, LOST):
            reason = f"its process ended with {code}"
        elif code == LOST and not goes_on:
            reason = "the device was lost, and there was no time or use for another process"
        if reason:
            pieces = [piece for part, piece in record.begun if part == name]
            where = f", in {pieces[-1]}" if pieces else ""
            record.add(Row(name, f"part {name}", FAILED, reason=reason + where))
        if code in (0, None) or not goes_on:
            return


def _process(name: str, record: Record, until: float, *, dry: bool) -> int | None:
    """The exit code of one process of a part, whose rows are then in the record; None if killed."""
    record.save()
    options = ["--child", name, "--until", str(until), "--json", str(record.path)]
    command = module_command("benchmarks.gpu", *options, *["--dry-run"] * dry)
    environment, left = module_environment("benchmarks.gpu"), until - time.time()
    try:
        return subprocess.run(command, env=environment, timeout=left).returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        record.load()


def main(given: list[str] | None = None) -> int:
    """Runs the parts; returns the exit code."""
    args = arguments(given)
    if not args.dry_run and not torch.cuda.is_available():
        print(
            "python -m benchmarks.gpu needs a GPU and torch sees none: run it on a machine with "
            "one, or add --dry-run",
            file=sys.stderr,
        )
        return 2
    if args.child:
        record = Record(args.json, {})
        record.load()
        try:
            run_part(args.child, record, dry=args.dry_run, seconds=args.until - time.time())
        except DeviceLostError:
            return LOST
        return 0
    with TemporaryDirectory() as folder:
        path = args.json or (None if args.dry_run else Path(folder) / "gpu.json")
        record = Record(path, about(dry=args.dry_run))
        print(f"{record.about['device']}, torch {record.about['torch']}")
        print(HEADER)
        for name in args.parts:
            print(f"{name}:", flush=True)
            if args.dry_run:
                run_part(name, record, dry=True, seconds=PARTS[name].seconds)
            else:
                run_child(name, record)
        record.save()
    print(record.summary())
    return 1 if record.count(FAILED) else 0


if __name__ == "__main__":
    sys.exit(main())
