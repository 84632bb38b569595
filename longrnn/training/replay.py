"""Writes and replays files with the micro-batch of a step that was not finite."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from longrnn.errors import UserError
from longrnn.state import LMState, leaves, unflatten
from longrnn.tasks import Batch
from longrnn.training import models, sharding
from longrnn.training.checkpoint import read_tensors, write_tensors
from longrnn.training.mitigated import spec_of, under
from longrnn.training.nonfinite import Examination, examine
from longrnn.training.objective import Objective
from longrnn.training.processes import together

FORMAT = "longrnn-nonfinite-1"
NAME = re.compile(r"(?:nonfinite|spike)-(\d{8})\.pt")
DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# What is reported where the second computation of the step finds nothing.
ALL_FINITE = (
    "the gradient summed over micro-batches and processes is not finite, and each part of it is "
    "when it is computed again"
)

MicroBatch: TypeAlias = tuple[list[Batch], LMState]


def save_failure(
    accelerator: Accelerator,
    objective: Objective,
    micros: Sequence[MicroBatch],
    path: Path,
    *,
    where: str | None = None,
) -> tuple[str, list[Tensor]]:
    """Finds where a step stopped being finite, and writes the micro-batch that shows it.

    Args:
        accelerator: all its processes call this.
        objective: without a wrapper for many devices.
        micros: the micro-batches of this process, each with its initial state.
        path: the file, `nonfinite-STEP.pt`; the first process that finds something writes it.
        where: what is not finite, where that is known.

    Returns:
        What is not finite, in words (the same in all processes), and the
        `Examination.finite_rows` of each micro-batch.
    """
    found = [examine(objective, *part, accelerator.autocast()) for part in micros]
    bad = [index for index, seen in enumerate(found) if seen.where is not None]
    reports = gather_object([found[bad[0]].where if bad else None])
    process = next((rank for rank, one in enumerate(reports) if one is not None), 0)
    reported = where or reports[process] or ALL_FINITE

    writes = accelerator.process_index == process
    weights = sharding.gathered(objective.model.state_dict(), keep=writes)

    def write() -> None:
        if not writes:
            return
        index = bad[0] if bad else 0
        segments, state = micros[index]
        content = {
            "format": FORMAT,
            "step": steps(path),
            "process": process,
            "micro_batch": index,
            "where": reported,
            "layer": found[index].layer,
            "parameter": found[index].parameter,
            "segments": [
                {n: v.cpu() if isinstance(v, Tensor) else v for n, v in batch._asdict().items()}
                for batch in segments
            ],
            "state": {name: leaf.detach().cpu() for name, leaf in leaves(state)},
            "config": models.description(objective.model),
            "model": {name: weight.cpu() for name, weight in weights.items()},
            "mitigation": spec_of(objective.model),
            "mixed_precision": accelerator.mixed_precision,
        }
        write_tensors(path, content)

    together(accelerator, write)
    return reported, [seen.finite_rows for seen in found]


def replay(path: Path, device: str = "cpu") -> tuple[dict[str, Any], Examination]:
    """Runs a micro-batch of `save_failure` again, from its initial state and with its weights.

    Args:
        path: the file.
        device: where to run.

    Returns:
        The content of the file, and the examination of the repeated micro-batch.

    Raises:
        UserError: the file is missing, damaged, or another kind of file.
    """
    content = read_tensors(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is not a batch to replay: give a nonfinite-*.pt of a training run")
    model = models.rebuild(content["config"], str(path))
    model.load_state_dict(content["model"])
    model.to(device)
    segments = [Batch(**batch).to(torch.device(device)) for batch in content["segments"]]
    objective = Objective(under(model, content.get("mitigation"))).train()
    like = objective.model.init_state(len(segments[0].tokens))
    state = unflatten(like, [content["state"][name].to(device) for name, _ in leaves(like)])
    dtype = DTYPES[content["mixed_precision"]]
    precision = torch.autocast(torch.device(device).type, dtype) if dtype else nullcontext()
    return content, examine(objective, segments, state, precision)


def files(output_dir: Path) -> list[Path]:
    """The files that `save_failure` wrote into a folder, by step."""
    if not output_dir.is_dir():
        return []
    found = [path for path in output_dir.iterdir() if NAME.fullmatch(path.name)]
    return sorted(found, key=steps)


def steps(path: Path) -> int:
    """The step of a file, counted from 1 as in the metrics."""
    return int(path.stem.rpartition("-")[2])
