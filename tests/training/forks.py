"""The command line in processes that start at once.

They are forks of a server that has imported everything and done nothing: real processes with real
signals, whose life is not mostly imports, so that a random moment of it falls within the training.
"""

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.training.runs import ENVIRONMENT

SERVER = multiprocessing.get_context("forkserver")
# Most of what a command imports; building an optimizer imports torch._dynamo.
SERVER.set_forkserver_preload(
    ["longrnn.training.train", "longrnn.training.finetune", "longrnn.cli.app", "torch._dynamo"]
    + ["longrnn.evaluation.run", "longrnn.evaluation.before_after", "longrnn.evaluation.perplexity"]
    + ["longrnn.reporting.tables", "matplotlib.backends.backend_agg", "jinja2", "transformers"]
)
LIMIT = 100  # seconds that anything may take


class Fork:
    """`longrnn …` as a process; its output goes to files in `folder`."""

    def __init__(self, *arguments: str | Path, folder: Path, **environment: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._err = folder / "out", folder / "err"
        variables = {**ENVIRONMENT, **environment}
        self.process: ForkServerProcess = SERVER.Process(
            target=_main, args=([*map(str, arguments)], self._out, self._err, variables)
        )
        self.process.start()

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def when(
        self, ready: Callable[[], bool], *, limit: float = LIMIT, every: float = 0.0005
    ) -> bool:
        """Asks every so many seconds until `ready()`; false where the process ends before."""
        deadline = time.monotonic() + limit
        while not ready():
            if not self.process.is_alive():
                return False
            assert time.monotonic() < deadline, self.err
            time.sleep(every)
        return True

    def end(self) -> int:
        """Waits for the exit code, that of a signal negative."""
        self.process.join(LIMIT)
        assert self.process.exitcode is not None, f"still running\n{self.out}\n{self.err}"
        return self.process.exitcode


def _main(arguments: list[str], out: Path, err: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.argv = ["longrnn", *arguments]
    import torch

    from longrnn.cli.app import run as run_command

    # The server imported torch before; as many threads as a test, for the same bits.
    torch.set_num_threads(1)

    run_command()


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """One process, to its end."""
    with tempfile.TemporaryDirectory() as folder:
        process = Fork(*arguments, folder=Path(folder), **environment)
        code = process.end()
        return subprocess.CompletedProcess(arguments, code, process.out, process.err)


def group(*arguments: str | Path, folder: Path, size: int = 2, **environment: str) -> list[Fork]:
    """Processes that gloo joins, as a launcher starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": port, **environment}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return [Fork(*arguments, folder=folder / own["RANK"], **world, **own) for own in ranks]


def rows(output: Path) -> int:
    """How many rows of metrics a run has written."""
    path = output / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def kill_at_random(process: Fork, rng: random.Random, output: Path, most: int) -> None:
    """SIGKILL a little after a random row of metrics, between those there are and `most`."""
    first = rng.randint(min(rows(output), most), most)
    assert process.when(lambda: rows(output) >= first and (output / "train.yaml").exists())
    process.process.join(rng.choice([0.0, 0.002, 0.01, 0.05]))
    process.send(signal.SIGKILL)
    assert process.end() == -signal.SIGKILL, process.err
