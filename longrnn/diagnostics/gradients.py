"""Measures gradients through time: why a recurrent model forgets, or why its training explodes.

Notable choices:
- Everything is measured in float64, in which vanishing gradients do not underflow.
- If loss or gradient are not finite in the model's own dtype, only this is reported.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longrnn.cells import Mamba2
from longrnn.data import Batch, Task
from longrnn.diagnostics.jacobian import Step, lyapunov, spectrum
from longrnn.diagnostics.nonfinite import examine
from longrnn.diagnostics.through_time import Run, clipping, histogram, last_scored, norms
from longrnn.errors import UserError
from longrnn.files import write_atomic
from longrnn.models import RecurrentLM
from longrnn.progress import Progress
from longrnn.seeds import seeded
from longrnn.state import LMState, leaves
from longrnn.training.objective import Objective
from longrnn.units import check_count

FORMAT = "longrnn-gradients-1"
LENGTHS = (16, 32, 64)
# Tokens of a sequence at which spectra are taken, evenly spaced.
READINGS = 16
DEFINITION = (
    "Norms are those of ∂loss_T/∂h_k: h_k is the state that token k passes to token k + 1, and "
    "loss_T the loss at the last scored token alone. Slopes are fitted to the far half of the "
    "distances T − k. Jacobians are those of one layer's state after a token with respect to its "
    "state before it, at the input that the layer reads there."
)


class Subject(NamedTuple):
    """A model to diagnose, with its name and the clipping thresholds of its training."""

    name: str
    model: RecurrentLM
    max_grad_norm: float = 1.0
    max_grad_value: float = 0.01


class Settings(NamedTuple):
    """Settings of a diagnosis.

    Attributes:
        lengths: lengths of the task; norms and Jacobians are measured at the last one.
        rows: sequences of each length.
        exponents: Lyapunov exponents per layer.
        seed: seed of the sequences.
    """

    lengths: Sequence[int] = LENGTHS
    rows: int = 8
    exponents: int = 8
    seed: int = 0


class GradientRecord(NamedTuple):
    """The content of gradients.jsonl: the header `about`, and all other `rows`."""

    about: dict[str, Any]
    rows: list[dict[str, Any]]

    def of(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the rows of one kind whose fields have these values."""
        wanted = {"kind": kind, **fields}
        return [row for row in self.rows if wanted.items() <= row.items()]


def diagnose(
    subjects: Sequence[Subject],
    task: Task,
    settings: Settings,
    *,
    output: Path,
    described: str = "",
    quiet: bool = False,
) -> GradientRecord:
    """Measure gradients of models on one task, and write `gradients.jsonl`.

    Args:
        subjects: models with different names.
        task: the source of sequences.
        settings: see `Settings`.
        output: a folder; the file appears when it is complete.
        described: description of the task, for the record.
        quiet: show no progress.

    Raises:
        UserError: a model without recurrent weights or with too few ids, lengths that the task
            cannot make, settings out of range.
    """
    for name in ("rows", "exponents"):
        check_count(name, getattr(settings, name))
    check_count("the number of lengths", len(settings.lengths))
    for subject in subjects:
        check(subject.model, task)
    batches = {length: _draw(task, length, settings) for length in settings.lengths}
    rows: list[dict[str, Any]] = []
    steps = len(subjects) * len(batches)
    with Progress("gradients", steps, unit="lengths", quiet=quiet) as progress:
        for subject in subjects:
            for length, batch in batches.items():
                found = list(_measure(subject, batch, length, settings))
                rows += [{"subject": subject.name, **row} for row in found]
                progress.advance(1, 1, subject.name)
    head = {
        "format": FORMAT,
        "task": described,
        "subjects": {subject.name: subject.model.fingerprint() for subject in subjects},
        **settings._asdict(),
        "definition": DEFINITION,
    }
    lines = [json.dumps(_plain(row), ensure_ascii=False) for row in (head, *rows)]
    write_atomic(output / "gradients.jsonl", "".join(f"{line}\n" for line in lines))
    return GradientRecord(head, rows)


def check(model: object, task: Task) -> None:
    """Raise a UserError if a model has no recurrent weights or does not fit the task."""
    if not isinstance(model, RecurrentLM) or not all(m.recurrent_weights for m in model.cells):
        raise UserError(
            f"a {type(model).__name__} has no recurrent weights whose gradient could be followed: "
            "give a checkpoint or configuration of an RNN, GRU, LSTM or Mamba-2"
        )
    if model.vocab_size < task.vocab_size:
        raise UserError(
            f"the task uses {task.vocab_size} token ids and the model has {model.vocab_size}: give "
            "the task that the model was made for"
        )


def default_lengths(task: Task) -> list[int]:
    """Return LENGTHS, or the default length of a task for which these are too short."""
    try:
        task.sample(1, length=min(LENGTHS))
    except UserError:
        return [task.default_length]
    return list(LENGTHS)


def _draw(task: Task, length: int, settings: Settings) -> Batch:
    return task.sample(settings.rows, length=length, seed=settings.seed)


def _measure(
    subject: Subject, batch: Batch, length: int, settings: Settings
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model and length."""
    model = subject.model
    batch = batch.to(next(model.parameters()).device)
    where = nonfinite(model, batch)
    if where is not None:
        yield {"kind": "nonfinite", "length": length, "where": where}
        return
    wide = copy.deepcopy(model).double().eval()
    for cell in wide.cells:
        if isinstance(cell, Mamba2):
            cell.backend = "torch"  # which has second derivatives
    clipped = clipping(wide, batch, subject.max_grad_norm, subject.max_grad_value)
    yield {"kind": "clipping", "length": length, **clipped}
    tokens, targets = last_scored(batch)
    run = Run(wide, tokens)
    for layer, gradient in enumerate(run.weight_gradients(targets)):
        yield {"kind": "weights", "length": length, "layer": layer, **histogram(gradient)}
    if length == settings.lengths[-1]:
        for row in norms(run, targets):
            yield {"kind": "norms", **row}
        yield from jacobians(wide, tokens[:1], settings)


def nonfinite(model: RecurrentLM, batch: Batch) -> str | None:
    """What is not finite in the loss of a batch or its gradient, and where it begins: the layer,
    the parameter, and the first token after which a state is not finite; None where all is."""
    state = model.init_state(len(batch.tokens))
    seen = examine(Objective(model), [batch], state, nullcontext())
    if seen.where is None:
        return None
    with torch.no_grad():
        for position, token in enumerate(batch.tokens.split(1, dim=1)):
            state = model(token, state, keep=0).state
            bad = [n for n, leaf in leaves(state.layers) if not leaf.isfinite().all()]
            if bad:
                at = f"the first state that is not finite is layers.{bad[0]} after token {position}"
                return f"{seen.where}; {at}"
    return seen.where


def jacobians(model: RecurrentLM, tokens: Tensor, settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield spectra of the step Jacobian along one sequence, and Lyapunov exponents, by layer."""
    states, inputs = _trajectory(model, tokens)
    time = tokens.shape[1]
    readings = sorted({round(i * (time - 1) / (READINGS - 1)) for i in range(READINGS)})
    for layer, mixer in enumerate(model.cells):
        generator = seeded(settings.seed)
        steps = [
            Step(mixer, inputs[layer][:, t : t + 1], states[t].layers[layer]) for t in range(time)
        ]
        for position in readings:
            found = spectrum(steps[position], generator)
            yield {
                "kind": "jacobian",
                "layer": layer,
                "position": position,
                "size": steps[position].size,
                **found._asdict(),
            }
        exponents = lyapunov(steps, settings.exponents, generator)
        yield {"kind": "lyapunov", "layer": layer, "exponents": exponents}


@torch.no_grad()
def _trajectory(model: RecurrentLM, tokens: Tensor) -> tuple[list[LMState], list[Tensor]]:
    """Return the state before each token, and the input of each layer's mixer, `(1, t, d)`."""
    states = [model.init_state(1)]
    with _inputs(model) as seen:
        for token in tokens.split(1, dim=1):
            states.append(model(token, states[-1], keep=0).state)
    return states[:-1], [torch.cat(pieces, dim=1) for pieces in seen]


@contextmanager
def _inputs(model: RecurrentLM) -> Iterator[list[list[Tensor]]]:
    """Record the inputs of the mixers within this context, by layer."""
    seen: list[list[Tensor]] = [[] for _ in model.cells]
    handles = [
        mixer.register_forward_pre_hook(partial(_keep, kept))
        for mixer, kept in zip(model.cells, seen, strict=True)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _keep(kept: list[Tensor], module: nn.Module, args: tuple[Any, ...]) -> None:
    kept.append(args[0])


def _plain(value: Any) -> Any:
    """Return a value for JSON; numbers that are not finite become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
