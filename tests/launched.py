"""Commands as several real processes on one CPU, as `accelerate launch` starts them.

`launched` gives forks of a server the environment that the launcher would give them: the same
processes, without seconds of imports in each.
"""

import os
import subprocess
import tempfile
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from tests.training.forks import group

REPOSITORY = Path(__file__).parents[1]
CPU2 = ("--config_file", str(REPOSITORY / "configs/accelerate/cpu2.yaml"))
FSDP2 = ("--config_file", str(REPOSITORY / "configs/accelerate/cpu2_fsdp2.yaml"))


def launched(
    *arguments: str | Path, processes: int = 2, flags: tuple[str, ...] = CPU2
) -> subprocess.CompletedProcess[str]:
    """The processes that accelerate would start, to their end; the first code that is not 0."""
    environment = _variables(processes, flags)
    with tempfile.TemporaryDirectory() as folder:
        started = group(*arguments, folder=Path(folder), size=processes, **environment)
        codes = [process.end() for process in started]
        out = "".join(process.out for process in started)
        err = "".join(process.err for process in started)
    return subprocess.CompletedProcess(arguments, next(filter(None, codes), 0), out, err)


def _variables(processes: int, flags: tuple[str, ...]) -> dict[str, str]:
    """The environment variables that accelerate sets for the processes that it starts."""
    port = ("--main_process_port", "0")
    given = [*flags, "--num_processes", str(processes), *port, "-m", "longrnn.cli"]
    options, *_ = _validate_launch_command(launch_command_parser().parse_args(given))
    assert options.use_fsdp or options.multi_gpu  # else accelerate starts one process
    variables = prepare_multi_gpu_env(options)
    return {name: value for name, value in variables.items() if os.environ.get(name) != value}
