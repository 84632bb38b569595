"""Commands under `accelerate launch`, as several real processes on one CPU."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests.training.runs import ENVIRONMENT

REPOSITORY = Path(__file__).parents[1]
CPU2 = REPOSITORY / "configs/accelerate/cpu2.yaml"


def launch(*arguments: str | Path, processes: int = 2) -> subprocess.Popen[str]:
    """Start `longrnn` with arguments in several processes, on a port of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CPU2)]
    command += ["--num_processes", str(processes), "--main_process_port", port]
    command += ["-m", "longrnn.cli", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)


def launched(*arguments: str | Path, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """`launch`, to its end."""
    process = launch(*arguments, processes=processes)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)
