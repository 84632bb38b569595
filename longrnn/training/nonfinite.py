"""A loss or gradient that is not finite: where it begins, and a file to look at it again.

No step pays for this: a step only asks whether its loss and the norm of its gradient are finite.
Where one is not, its micro-batches run again with hooks on every module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from longrnn.errors import UserError
from longrnn.state import LMState, leaves, tree_map
from longrnn.tasks import Batch
from longrnn.training import models, sharding
from longrnn.training.checkpoint import read_tensors, write_tensors
from longrnn.training.objective import Objective
from longrnn.training.processes import together

FORMAT = "longrnn-nonfinite-1"
NAME = re.compile(r"nonfinite-(\d{8})\.pt")
MODEL = "model"  # what `Objective` calls the model
LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)  # its square still has a value
DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}

# Where nothing is found when the step is computed again.
ALL_FINITE = (
    "the gradient summed over micro-batches and processes is not finite, and each part of it is "
    "when it is computed again"
)

Part: TypeAlias = tuple[list[Batch], LMState]


@dataclass
class Size:
    """The outputs of one module over all its calls: root mean square, and largest magnitude."""

    squares: float = 0.0
    count: int = 0
    largest: float = 0.0

    def add(self, values: Tensor) -> None:
        wide = values.detach().double()
        self.squares += float(wide.square().sum())
        self.count += wide.numel()
        worst = float(wide.abs().max()) if wide.numel() else 0.0
        self.largest = worst if math.isnan(worst) else max(self.largest, worst)

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / max(self.count, 1))


@dataclass
class Examination:
    """What one micro-batch does, forwards and backwards.

    Attributes:
        loss: its loss.
        finite_rows: `(b,)` bool, rows of which everything was finite on the way forward.
        layer: where the first value that is not finite came from, in order of execution; None.
        parameter: the first parameter of the model whose gradient is not finite or, where all are
            and the norm over them overflows, the one with the largest; None.
        sizes: outputs by module, in order of execution.
        gradients: norms by parameter.
    """

    loss: float
    finite_rows: Tensor
    layer: str | None = None
    parameter: str | None = None
    sizes: dict[str, Size] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)

    @property
    def where(self) -> str | None:
        """What is not finite and where it begins; None where all is finite."""
        if self.layer is not None:
            first = f"the first value that is not finite is {self.layer}"
            return f"the loss is {self.loss:.4g}, and {first}"
        if self.parameter is not None:
            norm = self.gradients[self.parameter]
            which = (
                f"the norm of the gradient overflows, most in {self.parameter} ({norm:.4g})"
                if math.isfinite(norm)
                else f"the first gradient that is not finite is that of {self.parameter}"
            )
            return f"the loss is {self.loss:.4g}, and {which}"
        return None


def examine(
    objective: Objective,
    segments: Sequence[Batch],
    state: LMState,
    precision: AbstractContextManager[Any],
) -> Examination:
    """Runs a micro-batch with an eye on every module; weights and their gradients are left alone.

    Args:
        objective: without a wrapper for many devices.
        segments: of the micro-batch.
        state: what it starts from.
        precision: the context that the forward pass runs in.
    """
    seen = Examination(math.nan, torch.ones(len(segments[0].tokens), dtype=torch.bool))
    parameters = {n: p for n, p in objective.named_parameters() if p.requires_grad}
    for name, weight in objective.named_parameters():
        if seen.layer is None and not weight.isfinite().all():
            seen.layer = f"the weight {_short(name)}"
    _look(seen, "in the initial state", state.layers)
    handles = [h for name, module in objective.named_modules() for h in _watch(seen, name, module)]
    try:
        with precision:
            output = objective(segments, state)
    finally:
        for handle in handles:
            handle.remove()
    seen.loss = float(output.loss.detach())
    gradients = torch.autograd.grad(output.loss, list(parameters.values()), allow_unused=True)
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        seen.gradients[_short(name)] = float(gradient.double().norm())
        if seen.parameter is None and not gradient.isfinite().all():
            seen.parameter = _short(name)
    if seen.parameter is None and math.hypot(*seen.gradients.values()) > LARGEST_NORM:
        seen.parameter = max(seen.gradients, key=lambda name: seen.gradients[name])
    return seen


def _look(seen: Examination, label: str, tree: Any) -> None:
    """Notes what is not finite in `tree`, and in which rows."""
    for values in _floats(tree):
        finite = values.isfinite()
        if values.ndim and len(values) == len(seen.finite_rows):
            seen.finite_rows &= finite.reshape(len(finite), -1).all(1).cpu()
        if seen.layer is None and not finite.all():
            seen.layer = label


def _watch(seen: Examination, name: str, module: nn.Module) -> Iterator[Any]:
    """Hooks on one module. What goes into it and is not finite was made by the module around it."""
    around, _, _ = name.rpartition(".")
    after = f"in the output of {_short(name)}" if name else "the loss itself"

    def entered(module: nn.Module, inputs: Any) -> None:
        _look(seen, f"made inside {_short(around)}", inputs)

    def left(module: nn.Module, inputs: Any, output: Any) -> None:
        _look(seen, after, output)
        first = next(_floats(output), None)
        if first is not None and name:
            seen.sizes.setdefault(_short(name), Size()).add(first)

    yield module.register_forward_pre_hook(entered)
    yield module.register_forward_hook(left)


def report(
    accelerator: Accelerator,
    objective: Objective,
    micros: Sequence[Part],
    path: Path,
    *,
    where: str | None = None,
) -> tuple[str, list[Tensor]]:
    """Says where a step went wrong, and writes the micro-batch that shows it.

    Args:
        accelerator: all its processes call this.
        objective: without a wrapper for many devices.
        micros: the micro-batches of this process, each with what it starts from.
        path: the file, `nonfinite-STEP.pt`; the first process that finds something writes it.
        where: what is not finite, where that is known.

    Returns:
        What to tell, the same in all processes, and `Examination.finite_rows` of each micro-batch.
    """
    found = [examine(objective, *part, accelerator.autocast()) for part in micros]
    bad = [index for index, seen in enumerate(found) if seen.where is not None]
    told = gather_object([found[bad[0]].where if bad else None])
    process = next((rank for rank, one in enumerate(told) if one is not None), 0)
    said = where or told[process] or ALL_FINITE

    weights = sharding.gathered(objective.model.state_dict())

    def write() -> None:
        if accelerator.process_index != process:
            return
        index = bad[0] if bad else 0
        segments, state = micros[index]
        content = {
            "format": FORMAT,
            "step": steps(path),
            "process": process,
            "micro_batch": index,
            "where": said,
            "layer": found[index].layer,
            "parameter": found[index].parameter,
            "segments": [
                {n: v.cpu() if isinstance(v, Tensor) else v for n, v in batch._asdict().items()}
                for batch in segments
            ],
            "state": {name: leaf.detach().cpu() for name, leaf in leaves(state)},
            "config": models.description(objective.model),
            "model": {name: weight.cpu() for name, weight in weights.items()},
            "mixed_precision": accelerator.mixed_precision,
        }
        write_tensors(path, content)

    together(accelerator, write)
    return said, [seen.finite_rows for seen in found]


def replay(path: Path, device: str = "cpu") -> tuple[dict[str, Any], Examination]:
    """Runs a micro-batch that `report` wrote again, from its state and with its weights.

    Args:
        path: the file.
        device: where to run.

    Returns:
        The content of the file, and what the micro-batch does now.

    Raises:
        UserError: the file is missing, damaged, or another kind of file.
    """
    content = read_tensors(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is no batch to replay: give a nonfinite-*.pt of a training run")
    model = models.rebuild(content["config"], str(path))
    model.load_state_dict(content["model"])
    model.to(device)
    segments = [Batch(**batch).to(torch.device(device)) for batch in content["segments"]]
    like = model.init_state(len(segments[0].tokens))
    saved = iter([content["state"][name].to(device) for name, _ in leaves(like)])
    state = tree_map(lambda _: next(saved), like)
    dtype = DTYPES[content["mixed_precision"]]
    precision = torch.autocast(torch.device(device).type, dtype) if dtype else nullcontext()
    return content, examine(Objective(model).train(), segments, state, precision)


def files(output_dir: Path) -> list[Path]:
    """What `report` wrote into a folder, by step."""
    if not output_dir.is_dir():
        return []
    return sorted(path for path in output_dir.iterdir() if NAME.fullmatch(path.name))


def steps(path: Path) -> int:
    """The number of the step that a file is about, counted from 1 as in the metrics."""
    return int(path.stem.removeprefix("nonfinite-"))


def _floats(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        if tree.is_floating_point():
            yield tree
    elif isinstance(tree, (tuple, list)):
        for branch in tree:
            yield from _floats(branch)


def _short(name: str) -> str:
    """A name within the model."""
    return name.removeprefix(f"{MODEL}.")
