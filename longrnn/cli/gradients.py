"""`longrnn diagnose gradients`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from pydantic import BeforeValidator, Field

from longrnn.bundled import names
from longrnn.cli.command import Argument
from longrnn.cli.options import Output, lock_output, results_folder
from longrnn.config import read_recorded
from longrnn.console import print_rows
from longrnn.errors import UserError
from longrnn.options import Lengths, Options, listed

if TYPE_CHECKING:
    from longrnn.diagnostics.gradients import GradientRecord
    from longrnn.models import RecurrentLM


class ModelEntry(NamedTuple):
    """A model to diagnose.

    Attributes:
        name: what the report calls it.
        model: the model.
        tokenizer: name of its tokenizer.
        training: its training configuration; empty if none was recorded.
    """

    name: str
    model: RecurrentLM
    tokenizer: str
    training: dict[str, Any]


class Gradients(Options):
    """Which gradients are measured."""

    sources: Annotated[list[str], Argument("CHECKPOINT|CONFIG")]
    """Checkpoints, folders of training runs, or training configurations (a YAML file, or a name
    such as reverse_small) of models that are not trained yet."""
    task: str | None = None
    """Name of a task, or '{kind: NAME, option: value}' (default: the training task of the first
    model)."""
    texts: list[Path] = Field([])
    """A text file, for next-token prediction."""
    lengths: Lengths | None = None
    """Lengths of the task; gradients by distance and Jacobians use the last one (default: 16,32,64,
    or longer if the task needs it)."""
    init: Annotated[list[str], BeforeValidator(listed)] = Field([])
    """Initialisations of the cells to compare, such as default,orthogonal; only for configurations.
    """


def gradients(gradients: Gradients, output: Output) -> None:
    """Diagnose vanishing and exploding gradients, and the effect of initialisation.

    Writes gradients.jsonl, pictures and report.html. A loss or gradient that is not finite is
    reported with its layer, parameter and token.

    Example: longrnn diagnose gradients reverse_small --init default,orthogonal
    """
    from longrnn.data import TASKS
    from longrnn.diagnostics.gradients import default_lengths, diagnose
    from longrnn.diagnostics.gradients_report import summary, write_report
    from longrnn.hf.tokenizer import load_tokenizer

    inits, sources = gradients.init, list(dict.fromkeys(gradients.sources))
    opened = [one for source in sources for one in _open(source, inits)]
    spec = _task(gradients, opened[0])
    task = TASKS.build(spec, load_tokenizer(opened[0].tokenizer))
    options = {"init": ",".join(inits)} if inits else {}
    folder = output.output or results_folder("gradients", sources, options=options)
    record = diagnose(
        {one.name: one.model for one in opened},
        task,
        lengths=gradients.lengths or default_lengths(task),
        output=lock_output(folder),
        described=str(spec),
        quiet=output.quiet,
    )
    report, *pictures = write_report(record, folder)
    print_gradients(record)
    typer.echo(summary(record))
    typer.echo("\n".join(map(str, [folder / "gradients.jsonl", *pictures, report])))


def _open(source: str, inits: list[str]) -> list[ModelEntry]:
    """The model of a checkpoint, or the untrained models of a configuration, one per `init`."""
    from longrnn.hf.load import load_recurrent
    from longrnn.hf.names import resolve

    is_bundled = source in names("configs/train") and not Path(source).exists()
    if is_bundled or source.endswith((".yaml", ".yml")):
        return _untrained(source, inits)
    if inits:
        raise UserError(
            f"{source} is already trained, so --init does not apply to it: give a configuration "
            "(.yaml) or leave --init out"
        )
    model, folder = load_recurrent(source), resolve(source)
    # A checkpoint inside the folder of a run has its configuration one folder higher.
    recorded = read_recorded(folder) or read_recorded(folder.resolve().parent)
    return [ModelEntry(source, model, source, recorded)]


def _untrained(source: str, inits: list[str]) -> list[ModelEntry]:
    """The models of a configuration as training builds them, one per `init`."""
    import torch

    from longrnn.data import TASKS
    from longrnn.training.config import configured
    from longrnn.training.models import build, tokenizer_of
    from longrnn.training.optim import fill

    entries = []
    if inits and (start := configured(source, []).init_from) is not None:
        raise UserError(f"{source} starts from {start}: leave --init out")
    for init in inits or [None]:
        config = configured(source, [] if init is None else [f"model.mixer.init={init}"])
        task = TASKS.build(config.task, tokenizer_of(config))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)  # as training does
            model = build(config, task, lambda line: None)
        fill(model, config.fill)
        name = source if init is None else f"{Path(source).stem}, {init}"
        tokenizer = config.tokenizer or config.init_from or "bytes"
        entries.append(ModelEntry(name, model.under(None), tokenizer, config.model_dump()))
    return entries


def _task(given: Gradients, first: ModelEntry) -> dict[str, Any]:
    """The task as a mapping: the one that the user gave, else the one of the first model."""
    import yaml

    task = given.task
    if given.texts:
        if task not in (None, "text"):
            raise UserError("--text is for the task text: leave out --task or --text")
        return {"kind": "text", "data": [str(path) for path in given.texts]}
    if task is None:
        known = first.training.get("task")
        if not isinstance(known, dict):
            raise UserError(
                f"the training task of {first.name} is not known: give --task or --text"
            )
        return known
    try:
        described = yaml.safe_load(task)
    except (yaml.YAMLError, ValueError, RecursionError):
        described = None
    if isinstance(described, str):
        return {"kind": described}
    if not isinstance(described, dict):
        raise UserError(
            f"{task!r} is not a valid task: write a name, or '{{kind: NAME, option: value}}'"
        )
    return described


def print_gradients(record: GradientRecord) -> None:
    """Prints one row per model and layer."""
    from longrnn.diagnostics.gradients_report import layers

    columns = {
        "factor": "factor per token",
        "half_life": "halved every",
        "radius": "spectral radius",
        "singular": "singular value",
        "exponent": "Lyapunov",
    }
    rows = [
        [row["subject"], str(row["layer"])]
        + ["–" if row[name] is None else f"{row[name]:.4g}" for name in columns]
        for row in layers(record)
    ]
    if rows:
        titles = ["model", "layer", *columns.values()]
        print_rows("gradients through time", titles, rows, width=110)
