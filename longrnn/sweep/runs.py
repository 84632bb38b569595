"""Trains and evaluates the runs of a grid, several at a time, each in its own resumable process.

Notable choices:
- A run is `longrnn train … --resume` in its own process: what kills it kills no other.
- A trainer reads a pipe that its sweep never writes to. It ends with the sweep, however that was
  killed, and the trainer then saves its step and stops as at SIGTERM.
- The process that trains inherits a lock on its log. The next sweep waits for it, instead of
  starting the same run while a trainer whose sweep was killed still saves its step.
- A run is evaluated where it was trained; its row in `results.jsonl` says that it is done.
"""

from __future__ import annotations

import fcntl
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import BinaryIO, NamedTuple

from longrnn.config import dump_config
from longrnn.errors import UserError
from longrnn.evaluation import sequences
from longrnn.files import write_atomic
from longrnn.hf.load import load
from longrnn.locks import Lock
from longrnn.programs import module_command, module_environment
from longrnn.progress import Progress
from longrnn.results import Results, Row, read_results
from longrnn.sweep.grid import GridRun
from longrnn.tasks import TASKS, SequenceTask
from longrnn.training.differences import with_defaults
from longrnn.training.metrics import read_metrics

# Seconds between checks whether the sweep is to stop.
POLL_SECONDS = 0.5


class Failure(NamedTuple):
    """A run that failed: its name, the reason, and its log."""

    name: str
    reason: str
    log: Path


class Sweep:
    """The runs of a grid in one folder.

    Args:
        points: the runs.
        folder: of everything; `runs/NAME` is the output folder of a run, `results.jsonl` has a row
            for each that is done.
        devices: `cpu`, `cuda`, `cuda:1`; runs take them in turns.
        jobs: number of runs at a time.
        quiet: print no progress.
    """

    def __init__(
        self,
        points: Sequence[GridRun],
        folder: Path,
        *,
        devices: Sequence[str] = ("cpu",),
        jobs: int = 1,
        quiet: bool = False,
    ) -> None:
        if jobs < 1:
            raise UserError(
                f"jobs must be at least 1, not {jobs}: give the number of runs at a time"
            )
        self.points, self.folder, self.quiet = points, folder, quiet
        self.jobs = jobs
        self.devices: queue.Queue[str] = queue.Queue()
        for index in range(jobs):
            self.devices.put(devices[index % len(devices)])
        self._stop = threading.Event()

    def run(self) -> tuple[list[Row], list[Failure]]:
        """Trains and evaluates what is not done.

        Returns:
            A row for each run that is done, in the order of the grid, and those that failed.

        Raises:
            UserError: the folder holds other results, or another sweep is at work in it.
            KeyboardInterrupt: after Ctrl-C, when the runs at work have saved their step.
            Terminated: likewise after SIGTERM.
        """
        with Lock.of_folder(self.folder, instead="choose another --output"):
            return self._run()

    def _run(self) -> tuple[list[Row], list[Failure]]:
        results = Results(self.folder / "results.jsonl", {"evaluation": "sweep"})
        left = [point for point in self.points if _row(results.rows, point) is None]
        failures: list[Failure] = []
        steps = sum(point.config.max_steps for point in left)
        title = f"sweep of {len(self.points)} runs, {len(left)} left, steps"
        with (
            Progress(title, steps, unit="steps", quiet=self.quiet) as progress,
            ThreadPoolExecutor(self.jobs) as pool,
        ):
            pending = {pool.submit(self._one, point): point for point in left}
            try:
                while pending:
                    done, _ = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        point = pending.pop(future)
                        self._collect(future, results, failures)
                        progress.advance(point.config.max_steps, point.config.max_steps, point.name)
            except BaseException:
                self._stop.set()
                for future in pending:
                    future.cancel()
                raise
        found = [(point, _row(results.rows, point)) for point in self.points]
        # A run that an earlier grid did may have been named by other keys.
        return [row | {"values": p.values} for p, row in found if row is not None], failures

    def _collect(
        self, future: Future[Row | Failure], results: Results, failures: list[Failure]
    ) -> None:
        outcome = future.result()
        if isinstance(outcome, Failure):
            failures.append(outcome)
            if not self.quiet:
                print(f"failed: {outcome.name}: {outcome.reason}", file=sys.stderr)
        else:
            results.append([outcome])

    def _one(self, point: GridRun) -> Row | Failure:
        """Trains and evaluates one run on a device of its own."""
        log = self.folder / "logs" / f"{point.name}.log"
        device = self.devices.get()
        try:
            reason = self._train(point, device, log)
            return (
                _measured(point, device, self.folder)
                if reason is None
                else Failure(point.name, reason, log)
            )
        except UserError as error:
            return Failure(point.name, str(error), log)
        finally:
            self.devices.put(device)

    def _train(self, point: GridRun, device: str, log: Path) -> str | None:
        """Runs `longrnn train`; returns why it did not end, or None."""
        config = self.folder / "configs" / f"{point.name}.yaml"
        write_atomic(config, dump_config(point.config))
        log.parent.mkdir(parents=True, exist_ok=True)
        command = module_command("longrnn.cli", "train", str(config))
        with open(log, "ab") as file:
            if not self._lock(file, point.name):
                return "the sweep was stopped before it began"
            begun = file.seek(0, os.SEEK_END)
            with subprocess.Popen(
                [*command, "--resume", "--quiet", "--attended"],
                stdin=subprocess.PIPE,  # see `_terminate_at_end_of_input`
                stdout=file,
                stderr=file,
                env=_environment(device, self.jobs),
                start_new_session=True,  # Ctrl-C is handed on once, by this process
            ) as child:
                code = self._wait(child)
        if code == 0 and (Path(point.config.output_dir) / "model.safetensors").is_file():
            return None
        output = log.read_bytes()[begun:].decode(errors="replace").split("\n")
        last = next((line for line in reversed(output) if line.strip()), f"exit code {code}")
        return last.removeprefix("error: ")

    def _lock(self, log: BinaryIO, name: str) -> bool:
        """Waits for the trainer of a sweep that was killed; False where the sweep is to stop."""
        reported = False
        while not self._stop.is_set():
            if _locked(log.fileno()):
                return True
            if not reported:
                print(f"waiting for {name}: its trainer is still saving its step", file=sys.stderr)
                reported = True
            self._stop.wait(POLL_SECONDS)
        return False

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """The exit code; a child is asked to end once the sweep is."""
        terminated = False
        while True:
            if self._stop.is_set() and not terminated:
                child.send_signal(signal.SIGTERM)
                terminated = True
            try:
                return child.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue


def _locked(descriptor: int) -> bool:
    """Takes the lock of an open file; False where another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _environment(device: str, jobs: int) -> dict[str, str]:
    """The environment in which `longrnn train` takes a device, and its share of the cores."""
    values = module_environment("longrnn.cli")
    values.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    kind, _, index = device.partition(":")
    if kind == "cpu":
        values["CUDA_VISIBLE_DEVICES"] = ""
    elif index:
        visible = [item for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if item]
        values["CUDA_VISIBLE_DEVICES"] = visible[int(index)] if visible else index
    return values


def _measured(point: GridRun, device: str, folder: Path) -> Row:
    """The row of a run that has ended: its last metrics, and its scores on held-out sequences."""
    output_dir = Path(point.config.output_dir)
    last = read_metrics(output_dir)[-1]
    metrics = {"training_loss": last["loss"]} if "loss" in last else {}
    task = TASKS.build(point.config.task, None)
    if isinstance(task, SequenceTask):
        model = load(output_dir, device=device)
        output = folder / "scores" / f"{point.name}.jsonl"
        # A run that was done may have gone on to more steps: its former scores are another model's.
        if output.is_file() and read_results(output)[0].get("model") != model.fingerprint():
            output.unlink()
        rows = sequences.evaluate(
            model, task, length=point.config.length.max, output=output, quiet=True
        )
        scores = sequences.summarise(rows)
        metrics = {name: score.mean for name, score in scores.items()} | metrics
    return {
        "run": point.name,
        "values": point.values,
        "metrics": metrics,
        "config": point.content(),
    }


def _row(rows: Sequence[Row], point: GridRun) -> Row | None:
    """The row of a run, if it is done with this very configuration."""
    content = point.content()
    return next((row for row in reversed(rows) if with_defaults(row["config"]) == content), None)
