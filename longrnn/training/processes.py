"""The processes of a run: that they are as many as were launched, and how they stop together."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, broadcast_object_list, gather_object

from longrnn.errors import UserError
from longrnn.training.config import PRECISIONS, TrainConfig
from longrnn.training.sharding import unseen_by_accelerate

T = TypeVar("T")

LAUNCH = (
    "launch with `accelerate launch --config_file configs/accelerate/cpu2.yaml -m longrnn.cli "
    "train …`, and see configs/accelerate/"
)


def build_accelerator(config: TrainConfig) -> Accelerator:
    """The accelerator, refused unless it has as many processes as were launched.

    Several launch commands start processes that each believe to be alone, and would train separate
    models without a word.

    Raises:
        UserError: the numbers differ, the launch wants another mixed precision than the run, or the
            tracker's package is missing.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and "RANK" not in os.environ:
        # Without it, accelerate would wait for processes that nobody started.
        raise UserError(
            f"{launched} processes were asked for (WORLD_SIZE) and this one has no RANK: {LAUNCH}"
        )
    _check_launch(config)
    if config.report_to != "none" and find_spec(config.report_to) is None:
        raise UserError(
            f"report_to={config.report_to} needs a package that is not installed: "
            f"pip install {config.report_to}"
        )
    with unseen_by_accelerate():
        accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision=config.mixed_precision,
            # The trainer divides by the number of micro-batches itself; without this, accelerate
            # would divide again by ACCELERATE_GRADIENT_ACCUMULATION_STEPS.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            log_with=None if config.report_to == "none" else config.report_to,
            project_dir=config.output_dir,
        )
    if config.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UserError(
            "mixed_precision=fp16 needs a GPU, and this run is on a CPU, where it would train in "
            "float32: set mixed_precision=bf16 or mixed_precision=no"
        )
    expected = config.num_processes or launched
    seen = accelerator.num_processes
    if seen != launched or seen != expected:
        raise UserError(
            f"{expected if seen == launched else launched} processes were asked for and this one "
            f"sees {seen}: {LAUNCH}"
        )
    return accelerator


# What a launch configuration can ask for and the trainer does not do, by environment variable.
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
        UserError: the launch asks for another mixed precision than the run, or for what the
            trainer does not do.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", *PRECISIONS):
        raise UserError(
            f"the launch configuration says mixed_precision {precision}, which is not supported: "
            f"set one of {', '.join(PRECISIONS)}"
        )
    if precision not in ("no", config.mixed_precision):
        raise UserError(
            f"the launch configuration says mixed_precision {precision} and the run says "
            f"{config.mixed_precision}: add mixed_precision={precision} behind the configuration"
        )
    compiler = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler.lower() not in OFF:
        raise UserError(
            f"the launch configuration says dynamo_backend {compiler}, and models are not compiled "
            "here: set dynamo_backend to 'no' in it (ACCELERATE_DYNAMO_BACKEND=no)"
        )
    for name, what in UNSUPPORTED.items():
        if os.environ.get(name, "").lower() not in OFF:
            raise UserError(
                f"the launch configuration asks for {what} ({name}), which longrnn does not do: "
                "take one of configs/accelerate/"
            )


# What holds a process group, to the end of the process: the destructor of gloo's groups loses a
# wake-up now and then, and waits for ever. The command line leaves without destructors.
_KEPT: list[Any] = []


def keep_alive(accelerator: Accelerator, module: Any) -> None:
    """Keeps a prepared module, and with it its process group, from being destroyed."""
    if accelerator.num_processes > 1:
        _KEPT.append(module)


def on_main(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """What `work` returns, run by the main process alone; the others wait for it.

    Raises:
        UserError, OSError: in all processes, where `work` raises it.
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
    """Each process does its part, and waits for the others.

    Raises:
        OSError: in all processes, where one of them raises it.
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
    """Opens what `report_to` names, in a folder of its own inside `output_dir`.

    Args:
        accelerator: of `build_accelerator`.
        config: the run.
        step: steps done; what a tracker has of later ones is dropped, because they are run again.
    """
    kind = config.report_to
    accelerator.init_trackers(kind, init_kwargs={"tensorboard": {"purge_step": step + 1}})


class Interrupts:
    """Within this context, Ctrl-C and SIGTERM are noted and do not break a step in two.

    Attributes:
        asked: the first of the two that came, or None.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked: int | None = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or number

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
