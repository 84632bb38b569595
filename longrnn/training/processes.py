"""The processes of a run: checks of the launch, work in one or all of them, and signals."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, broadcast_object_list, gather_object

from longrnn.config import flat
from longrnn.errors import Terminated, UserError
from longrnn.files import one_line, write_atomic
from longrnn.training.config import PRECISIONS, TrainConfig
from longrnn.training.sharding import unseen_by_accelerate

T = TypeVar("T")
# The project of runs in wandb and trackio, and the file with the identity of a run there.
PROJECT, TRACKER_ID = "longrnn", "tracker-id"

LAUNCH = (
    "launch with `longrnn launch --cpu --num_processes 2 train …`, or with --config_file gpu8 on "
    "eight GPUs"
)


def build_accelerator(config: TrainConfig) -> Accelerator:
    """The accelerator of a run, whose number of processes must equal that of the launch.

    Some launch commands start processes that do not find each other, and would train separate
    models without a warning.

    Raises:
        UserError: the numbers differ, launch and run have different mixed precision, or the
            tracker's package is missing.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and "RANK" not in os.environ:
        # Without it, accelerate would wait for processes that were never started.
        raise UserError(
            f"{launched} processes were requested (WORLD_SIZE) and this one has no RANK: {LAUNCH}"
        )
    _check_launch(config)
    if config.report_to != "none" and find_spec(config.report_to) is None:
        raise UserError(
            f"report_to={config.report_to} needs a package that is not installed: "
            f"pip install {config.report_to}"
        )
    with unseen_by_accelerate():
        try:
            accelerator = Accelerator(
                cpu=not torch.cuda.is_available(),
                mixed_precision=config.mixed_precision,
                # The trainer divides by the number of micro-batches itself; without this,
                # accelerate would divide again by ACCELERATE_GRADIENT_ACCUMULATION_STEPS.
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
                log_with=None if config.report_to == "none" else config.report_to,
                project_dir=config.output_dir,
            )
        except ValueError as error:  # accelerate's settings belong to the process
            raise UserError(
                f"accelerate refuses the settings of this run ({one_line(error)}): start it in a "
                "new Python process, for example with `longrnn train`"
            ) from error
    if config.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UserError(
            "mixed_precision=fp16 needs a GPU, and this run is on a CPU, where it would train in "
            "float32: set mixed_precision=bf16 or mixed_precision=no"
        )
    expected = config.num_processes or launched
    seen = accelerator.num_processes
    if seen != launched or seen != expected:
        raise UserError(
            f"{expected if seen == launched else launched} processes were requested and this one "
            f"sees {seen}: {LAUNCH}"
        )
    return accelerator


# Settings of a launch configuration that the trainer does not support, by environment variable.
UNSUPPORTED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
    "ACCELERATE_DOWNCAST_BF16": "downcast_bf16",
}
OFF = ("", "0", "no", "n", "off", "f", "false")


def _check_launch(config: TrainConfig) -> None:
    """Refuses a launch whose environment would change what the run computes.

    Raises:
        UserError: launch and run have different mixed precision, or the launch has a setting that
            the trainer does not support.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", *PRECISIONS):
        raise UserError(
            f"the launch configuration has mixed_precision {precision}, which is not supported: "
            f"set one of {', '.join(PRECISIONS)}"
        )
    if precision not in ("no", config.mixed_precision):
        raise UserError(
            f"the launch configuration has mixed_precision {precision} and the run has "
            f"{config.mixed_precision}: add mixed_precision={precision} behind the configuration"
        )
    compiler = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler.lower() not in OFF:
        raise UserError(
            f"the launch configuration has dynamo_backend {compiler}, and models are not compiled "
            "here: set dynamo_backend to 'no' in it (ACCELERATE_DYNAMO_BACKEND=no)"
        )
    for name, what in UNSUPPORTED.items():
        if os.environ.get(name, "").lower() not in OFF:
            raise UserError(
                f"the launch configuration has {what} ({name}), which longrnn does not support: "
                "take a bundled one, as in `longrnn launch --config_file gpu8`"
            )


# Keeps process groups until the process ends: the destructor of gloo's groups sometimes misses a
# wake-up and waits forever. The command line exits without destructors.
_KEPT: list[Any] = []


def keep_alive(accelerator: Accelerator, module: Any) -> None:
    """Keeps a prepared module, and with it its process group, from being destroyed."""
    if accelerator.num_processes > 1:
        _KEPT.append(module)


def on_main(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Runs `work` in the main process and returns its result in all processes.

    Raises:
        UserError, OSError: in all processes, if `work` raises it.
    """
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = work()
        except (UserError, OSError) as error:
            outcome[1] = error
    result, error = broadcast_object_list(outcome)
    if error is not None:
        raise error
    return result


def together(accelerator: Accelerator, work: Callable[[], None]) -> None:
    """Runs `work` in each process, and waits for the others.

    Raises:
        OSError: in all processes, if one of them raises it.
    """
    failed: list[OSError | None] = [None]
    try:
        work()
    except OSError as error:
        failed = [error]
    for error in gather_object(failed):
        if error is not None:
            raise error


def start_trackers(accelerator: Accelerator, config: TrainConfig, step: int) -> None:
    """Opens the tracker `report_to`, in its own folder inside `output_dir`.

    Args:
        accelerator: of `build_accelerator`.
        config: the run.
        step: finished steps; the tracker drops later ones, because they run again.
    """
    kind = config.report_to
    if kind in ("none", "tensorboard"):
        accelerator.init_trackers(kind, init_kwargs={"tensorboard": {"purge_step": step + 1}})
        return
    folder = Path(config.output_dir)
    identity = on_main(accelerator, partial(_tracker_id, folder))
    name = f"{folder.resolve().name}-{identity}"
    options: dict[str, dict[str, Any]] = {
        "wandb": {"dir": str(folder), "name": name, "id": identity, "resume": "allow"},
        "trackio": {"name": name, "resume": "allow"},
    }
    values = {key: str(value) for key, value in flat(asdict(config)).items()}
    with redirect_stdout(sys.stderr):  # standard output is that of the command
        accelerator.init_trackers(PROJECT, config=values, init_kwargs=options)


def _tracker_id(folder: Path) -> str:
    """The name under which a tracker knows the run in a folder, also when it is resumed."""
    path = folder / TRACKER_ID
    if not path.is_file():
        write_atomic(path, secrets.token_hex(4))
    return path.read_text().strip()


class Interrupts:
    """Within this context, Ctrl-C and SIGTERM are recorded and do not interrupt a step.

    Attributes:
        received: the first of the two signals, or None.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def leave(self, done: str) -> NoReturn:
        """Ends a run that was asked to stop: raises KeyboardInterrupt, or Terminated with `done`.

        Terminated is raised after SIGTERM, and where another process received the signal.
        """
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(done)

    def __enter__(self) -> Self:
        self._before: Any = [signal.signal(number, self._note) for number in self.SIGNALS]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in zip(self.SIGNALS, self._before, strict=True):
            signal.signal(number, handler)
