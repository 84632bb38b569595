"""`longrnn diagnose gradients`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from longrnn.bundled import names
from longrnn.cli.options import Quiet, lock_output
from longrnn.cli.results_folders import results_folder
from longrnn.config import read_recorded
from longrnn.console import print_table
from longrnn.errors import UserError
from longrnn.units import parse_lengths

if TYPE_CHECKING:
    from longrnn.diagnostics.gradients import GradientRecord, Subject
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


def gradients(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Checkpoints, folders of training runs, or training configurations (a YAML file, "
            "or a name such as reverse_small) of models that are not trained yet.",
            metavar="CHECKPOINT|CONFIG...",
            show_default=False,
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option(
            help="Name of a task, or '{kind: NAME, option: value}'.",
            show_default="the training task of the first model",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="A text file, for next-token prediction.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Lengths of the task; gradients by distance and Jacobians use the last one.",
            show_default="16,32,64, or longer if the task needs it",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="Sequences for each length.")] = 8,
    exponents: Annotated[
        int, typer.Option(help="Lyapunov exponents to compute for each layer.")
    ] = 8,
    init: Annotated[
        str | None,
        typer.Option(
            help="Initialisations of the cells to compare, such as default,orthogonal; only for "
            "configurations."
        ),
    ] = None,
    max_grad_norm: Annotated[
        float | None,
        typer.Option(help="Gradient norm to clip at.", show_default="that of the run, or 1"),
    ] = None,
    max_grad_value: Annotated[
        float | None,
        typer.Option(
            help="Absolute value to clip gradient entries at.",
            show_default="that of the run, or 0.01",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the sequences.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the results.", show_default="results/gradients/NAMES"),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Diagnose vanishing and exploding gradients, and the effect of initialisation and clipping.

    Writes gradients.jsonl, pictures and report.html. A loss or gradient that is not finite is
    reported with its layer, parameter and token.

    Example: longrnn diagnose gradients reverse_small --init default,orthogonal
    """
    from longrnn.data import TASKS
    from longrnn.diagnostics.gradients import Settings, default_lengths, diagnose
    from longrnn.diagnostics.gradients_report import summary, write_report
    from longrnn.hf.tokenizer import load_tokenizer

    inits = [] if init is None else [name.strip() for name in init.split(",")]
    opened = [one for source in dict.fromkeys(sources) for one in _open(source, inits)]
    spec = _task(task, text, opened[0])
    built = TASKS.build(spec, load_tokenizer(opened[0].tokenizer))
    settings = Settings(
        lengths=default_lengths(built) if lengths is None else parse_lengths(lengths),
        rows=rows,
        exponents=exponents,
        seed=seed,
    )
    subjects = _subjects(opened, max_grad_norm, max_grad_value)
    options = {} if init is None else {"init": init}
    folder = lock_output(output or results_folder("gradients", list(sources), options=options))
    record = diagnose(subjects, built, settings, output=folder, described=str(spec), quiet=quiet)
    report, *pictures = write_report(record, folder)
    print_gradients(record)
    typer.echo(summary(record))
    typer.echo("\n".join(map(str, [folder / "gradients.jsonl", *pictures, report])))


def _open(source: str, inits: Sequence[str]) -> list[ModelEntry]:
    """The model of a checkpoint, or the untrained models of a configuration, one per `init`."""
    from longrnn.hf.loading import load_recurrent, resolve

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


def _untrained(source: str, inits: Sequence[str]) -> list[ModelEntry]:
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


def _task(task: str | None, text: list[Path] | None, first: ModelEntry) -> dict[str, Any]:
    """The task as a mapping: the one that the user gave, else the one of the first model."""
    import yaml

    if text:
        if task not in (None, "text"):
            raise UserError("--text is for the task text: leave out --task or --text")
        return {"kind": "text", "data": [str(path) for path in text]}
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


def _subjects(
    opened: Sequence[ModelEntry], max_grad_norm: float | None, max_grad_value: float | None
) -> list[Subject]:
    from longrnn.diagnostics.gradients import Subject

    for name, limit in (("norm", max_grad_norm), ("value", max_grad_value)):
        if limit is not None and not limit > 0:
            raise UserError(
                f"--max-grad-{name} must be above 0, not {limit}: give a positive number"
            )
    found = []
    for source in opened:
        default = Subject(source.name, source.model)
        found.append(
            default._replace(
                max_grad_norm=max_grad_norm
                or source.training.get("max_grad_norm")
                or default.max_grad_norm,
                max_grad_value=max_grad_value
                or source.training.get("max_grad_value")
                or default.max_grad_value,
            )
        )
    return found


def print_gradients(record: GradientRecord) -> None:
    """Prints one row per model and layer."""
    from rich.table import Table

    from longrnn.diagnostics.gradients_report import layers

    rows = layers(record)
    if not rows:
        return
    table = Table(title="gradients through time", title_justify="left")
    table.add_column("model", overflow="fold")  # names of checkpoints differ at their ends
    table.add_column("layer", justify="right")
    columns = {
        "factor": "factor per token",
        "half_life": "halved every",
        "radius": "spectral radius",
        "singular": "singular value",
        "exponent": "Lyapunov",
    }
    for title in columns.values():
        table.add_column(title, justify="right")
    for row in rows:
        cells = ["–" if row[name] is None else f"{row[name]:.4g}" for name in columns]
        table.add_row(row["subject"], str(row["layer"]), *cells)
    print_table(table, 110)
