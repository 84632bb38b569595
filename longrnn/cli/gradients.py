"""`longrnn diagnose gradients`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from longrnn.cli.options import Quiet, lock_output, results_folder, training
from longrnn.errors import UserError
from longrnn.units import parse_lengths

if TYPE_CHECKING:
    from longrnn.diagnostics.gradients import GradientRecord, Subject
    from longrnn.models import RecurrentLM


class Source(NamedTuple):
    """What a model came from: the model, its tokenizer, and what it is trained with."""

    name: str
    model: RecurrentLM
    tokenizer: str
    trained: dict[str, Any]


def gradients(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Checkpoints, folders of runs, or configurations (.yaml) of models yet untrained.",
            metavar="CHECKPOINT|CONFIG...",
            show_default=False,
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option(
            help="A task by name, or '{kind: NAME, option: value}'.",
            show_default="that of the first one's training",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="A text file, for the task of the next token.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Lengths of the task; gradients by distance and Jacobians at the last of them.",
            show_default="16,32,64, or the task's own where these are too short",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="Sequences of each length.")] = 8,
    exponents: Annotated[int, typer.Option(help="Lyapunov exponents of a layer.")] = 8,
    init: Annotated[
        str | None,
        typer.Option(
            help="Initialisations of the cells to compare, such as default,orthogonal; of "
            "configurations only."
        ),
    ] = None,
    max_grad_norm: Annotated[
        float | None, typer.Option(help="To clip at.", show_default="that of the run, or 1")
    ] = None,
    max_grad_value: Annotated[
        float | None,
        typer.Option(help="To cut entries at.", show_default="that of the run, or 0.01"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sequences.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the results.", show_default="results/gradients/NAMES"),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Whether gradients through time vanish or explode, and what initialisation or clipping do.

    Writes gradients.jsonl, pictures and report.html. A loss or gradient that is not finite is named
    with its layer, parameter and token.

    Example: longrnn diagnose gradients configs/train/reverse_small.yaml --init default,orthogonal
    """
    from longrnn.diagnostics.gradients import Settings, default_lengths, diagnose
    from longrnn.diagnostics.gradients_report import summary, write_report
    from longrnn.hf.tokenizer import load_tokenizer
    from longrnn.tasks import TASKS

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
    suffix = None if init is None else f"init={init}"
    folder = lock_output(output or results_folder("gradients", list(sources), suffix))
    record = diagnose(subjects, built, settings, output=folder, described=str(spec), quiet=quiet)
    report, *pictures = write_report(record, folder)
    print_gradients(record)
    typer.echo(summary(record))
    for source in dict.fromkeys(sources):
        typer.echo("".join(f"{line}\n" for line in _left_out(Path(source))), nl=False)
    typer.echo("\n".join(map(str, [folder / "gradients.jsonl", *pictures, report])))


def _open(source: str, inits: Sequence[str]) -> list[Source]:
    """The model of a checkpoint, or the untrained ones of a configuration, one an `init`."""
    from longrnn.hf.loading import load_recurrent, resolve

    if source.endswith((".yaml", ".yml")):
        return _untrained(source, inits)
    if inits:
        raise UserError(
            f"{source} is trained and --init is about how training begins: give a configuration "
            "(.yaml) or leave --init out"
        )
    model, folder = load_recurrent(source), resolve(source)
    # The checkpoints of a run lie inside its folder.
    return [Source(source, model, source, training(folder) or training(folder.resolve().parent))]


def _untrained(source: str, inits: Sequence[str]) -> list[Source]:
    from dataclasses import asdict, replace

    import torch

    from longrnn.config import load_config
    from longrnn.hf.loading import load_recurrent
    from longrnn.models import RecurrentLM
    from longrnn.seeds import check_seed
    from longrnn.training.config import TrainConfig

    config = load_config(TrainConfig, source)
    if config.init_from is not None:
        if inits:
            raise UserError(f"{source} goes on from {config.init_from}: leave --init out")
        model = load_recurrent(config.init_from)
        tokenizer = config.tokenizer or config.init_from
        return [Source(source, model, tokenizer, asdict(config))]
    if config.model is None:
        raise UserError(f"{source} builds a transformer: give a configuration with a model")
    found = []
    tokenizer = config.tokenizer or "bytes"
    for init in inits or [None]:
        mixer = config.model.mixer if init is None else {**config.model.mixer, "init": init}
        with torch.random.fork_rng(devices=[]):
            check_seed(config.seed)
            torch.manual_seed(config.seed)  # as training would begin
            model = RecurrentLM(replace(config.model, mixer=mixer))
        name = source if init is None else f"{Path(source).stem}, {init}"
        found.append(Source(name, model, tokenizer, asdict(config)))
    return found


def _task(task: str | None, text: list[Path] | None, first: Source) -> dict[str, Any]:
    """The description of the task: what was asked, or what the first model was trained on."""
    import yaml

    if text:
        if task not in (None, "text"):
            raise UserError("--text is for the task text: leave out --task or --text")
        return {"kind": "text", "files": [str(path) for path in text]}
    if task is None:
        known = first.trained.get("task")
        if not isinstance(known, dict):
            raise UserError(f"{first.name} does not say its task: give --task or --text")
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
    opened: Sequence[Source], max_grad_norm: float | None, max_grad_value: float | None
) -> list[Subject]:
    from longrnn.diagnostics.gradients import Subject

    for name, limit in (("norm", max_grad_norm), ("value", max_grad_value)):
        if limit is not None and not limit > 0:
            raise UserError(
                f"--max-grad-{name} must be above 0, not {limit}: give a positive number"
            )
    found = []
    for source in opened:
        like = Subject(source.name, source.model)
        found.append(
            like._replace(
                max_grad_norm=max_grad_norm
                or source.trained.get("max_grad_norm")
                or like.max_grad_norm,
                max_grad_value=max_grad_value
                or source.trained.get("max_grad_value")
                or like.max_grad_value,
            )
        )
    return found


def _left_out(folder: Path) -> list[str]:
    """What the run in a folder recorded of steps that were not finite."""
    from longrnn.training import nonfinite
    from longrnn.training.checkpoint import read_tensors

    lines = []
    for path in nonfinite.files(folder):
        content = read_tensors(path)
        lines.append(
            f"step {content['step']} of {folder}: {content['where']} (longrnn replay {path})"
        )
    return lines


def print_gradients(record: GradientRecord) -> None:
    """Print one row per model and layer."""
    from rich.console import Console
    from rich.table import Table

    from longrnn.diagnostics.gradients_report import layers

    rows = layers(record)
    if not rows:
        return
    table = Table(title="gradients through time", title_justify="left")
    table.add_column("model", overflow="fold")  # checkpoints of a run differ in their ends
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
    console = Console()
    Console(width=max(console.width, 110)).print(table)
