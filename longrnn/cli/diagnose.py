"""`longrnn diagnose states` and `longrnn diagnose gradients`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from longrnn.bundled import names
from longrnn.cli.command import Argument
from longrnn.cli.options import Model, Output, TrainLength, pick_device
from longrnn.config import read_recorded
from longrnn.console import print_rows
from longrnn.errors import UserError
from longrnn.evaluation.options import TextFile, Texts
from longrnn.options import Options, Tokens

if TYPE_CHECKING:
    from longrnn.models import TrainableLM
    from longrnn.text import Tokenizer


class States(Texts, TrainLength):
    """Which texts are read, and where their states are measured."""

    length: Tokens = 65536
    """Number of tokens of each text to read."""


def states(model: Model, states: States, output: Output) -> None:
    """Find the heads that collapse beyond the training length or keep the first tokens.

    Writes states.jsonl (by position), diagnosis.yaml (which lists the collapsing heads, so that a
    mitigation can be limited to them), pictures and report.html.

    Example: longrnn diagnose states passkey-tiny-short --text book.txt --length 64k
    """
    from longrnn.diagnostics.states import diagnose
    from longrnn.evaluation.texts import newlines, read_documents
    from longrnn.hf.names import training_length
    from longrnn.hf.opened import open_checkpoint
    from longrnn.reporting.states import summary, write_report

    if not states.texts and not states.newlines:
        raise UserError("give --text FILE, --newlines, or both")
    trained = states.train_length or training_length(model.checkpoint)
    folder = output.folder("states", [model.checkpoint], model.mitigation, states.texts)
    opened = open_checkpoint(model.checkpoint, model.mitigation, device=pick_device(model.device))
    documents = read_documents(states.texts, opened.tokenizer, opened.model)
    if states.newlines:
        documents.append(newlines(opened.tokenizer, states.length))
    diagnosis = diagnose(
        opened.model,
        documents,
        states.length,
        train_length=trained,
        checkpoint=model.checkpoint,
    )
    files = write_report(diagnosis, folder)
    typer.echo("\n".join([summary(diagnosis), diagnosis.about["criterion"], *map(str, files)]))


class Gradients(Options):
    """Which gradients are measured."""

    sources: Annotated[list[str], Argument("CHECKPOINT|CONFIG")]
    """Checkpoints, folders of training runs, or training configurations (a YAML file, or a name
    such as reverse_small) of models that are not trained yet; with overrides, in quotes, such as
    'reverse_small model.mixer.init=orthogonal'."""
    texts: list[TextFile] = Field([])
    """A text file, for next-token prediction (default: the training task of the first model)."""
    length: Tokens = 64
    """Length of the sequences of the task."""


def gradients(gradients: Gradients, output: Output) -> None:
    """Diagnose vanishing and exploding gradients, and the effect of initialisation.

    Writes gradients.jsonl, pictures and report.html.

    Example: longrnn diagnose gradients reverse_small 'reverse_small model.mixer.init=orthogonal'
    """
    from longrnn.data import TASKS
    from longrnn.diagnostics.gradients import measure
    from longrnn.progress import Progress
    from longrnn.reporting.gradients import GRADIENT_COLUMNS, table, write_report

    sources = list(dict.fromkeys(gradients.sources))
    folder = output.folder("gradients", sources, variant=gradients.texts)
    models = [(source, *_open(source)) for source in sources]
    first, _, _, spec = models[0]
    if gradients.texts:
        spec = {"kind": "text", "data": list(map(str, gradients.texts))}
    if spec is None:
        raise UserError(f"the training task of {first} is not known: give --text")
    rows = []
    with Progress("gradients", len(models), unit="models") as progress:
        for name, model, tokenizer, _ in models:
            task = TASKS.build(spec, tokenizer)
            rows += [{"model": name, **row} for row in measure(model, task, gradients.length)]
            progress.advance(1, 1, name)
    about = {
        "models": {name: model.fingerprint() for name, model, _, _ in models},
        "task": str(spec),
        "length": gradients.length,
    }
    report, *files = write_report(about, rows, folder)
    print_rows("gradients through time", list(GRADIENT_COLUMNS.values()), table(rows))
    typer.echo("\n".join(map(str, [*files, report])))


def _open(source: str) -> tuple[TrainableLM, Tokenizer, dict[str, Any] | None]:
    """Return the model, the tokenizer and the training task of a checkpoint or configuration."""
    from longrnn.hf.load import load_editable
    from longrnn.hf.names import resolve
    from longrnn.hf.tokenizer import load_tokenizer
    from longrnn.training.config import configured
    from longrnn.training.distributed import build_accelerator
    from longrnn.training.trainer import Trainer

    try:
        name, *overrides = [source] if Path(source).exists() else shlex.split(source)
    except ValueError as error:  # an open quote, or nothing but spaces
        raise UserError(
            f"{source!r} is neither a checkpoint nor a configuration with overrides: write it as "
            "'CONFIG KEY=VALUE'"
        ) from error
    if overrides or name in names("configs/train") or name.endswith((".yaml", ".yml")):
        config = configured(name, overrides)
        trainer = Trainer(config, build_accelerator(config), quiet=True)
        return trainer.model.under(None), trainer.tokenizer, config.task
    model: Any = load_editable(source)
    folder = resolve(source)
    # A checkpoint inside the folder of a run has its configuration one folder higher.
    recorded = read_recorded(folder) or read_recorded(folder.resolve().parent)
    return model, load_tokenizer(source), recorded.get("task")
