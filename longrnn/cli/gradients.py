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
    from longrnn.models import RecurrentLM
    from longrnn.text import Tokenizer


class ModelEntry(NamedTuple):
    """A model to diagnose, its name in the report, and its training task if that is known."""

    name: str
    model: RecurrentLM
    tokenizer: Tokenizer
    task: dict[str, Any] | None


class Gradients(Options):
    """Which gradients are measured."""

    sources: Annotated[list[str], Argument("CHECKPOINT|CONFIG")]
    """Checkpoints, folders of training runs, or training configurations (a YAML file, or a name
    such as reverse_small) of models that are not trained yet."""
    texts: list[Path] = Field([])
    """A text file, for next-token prediction (default: the training task of the first model)."""
    lengths: Lengths = Field([16, 32, 64])
    """Lengths of the task; gradients by distance and Jacobians use the last one."""
    init: Annotated[list[str], BeforeValidator(listed)] = Field([])
    """Initialisations of the cells to compare, such as default,orthogonal; only for configurations.
    """


def gradients(gradients: Gradients, output: Output) -> None:
    """Diagnose vanishing and exploding gradients, and the effect of initialisation.

    Writes gradients.jsonl, pictures and report.html.

    Example: longrnn diagnose gradients reverse_small --init default,orthogonal
    """
    from longrnn.data import TASKS
    from longrnn.diagnostics.gradients import measure
    from longrnn.diagnostics.gradients_report import COLUMNS, table, write_report
    from longrnn.progress import Progress

    inits, sources = gradients.init, list(dict.fromkeys(gradients.sources))
    entries = [one for source in sources for one in _open(source, inits)]
    spec = entries[0].task
    if gradients.texts:
        spec = {"kind": "text", "data": list(map(str, gradients.texts))}
    if spec is None:
        raise UserError(f"the training task of {entries[0].name} is not known: give --text")
    task = TASKS.build(spec, entries[0].tokenizer)
    folder = lock_output(output.output or results_folder("gradients", sources))
    rows = []
    with Progress("gradients", len(entries), unit="models") as progress:
        for one in entries:
            found = measure(one.model, task, gradients.lengths)
            rows += [{"model": one.name, **row} for row in found]
            progress.advance(1, 1, one.name)
    about = {
        "models": {one.name: one.model.fingerprint() for one in entries},
        "task": str(spec),
        "lengths": gradients.lengths,
    }
    report, *files = write_report(about, rows, folder)
    print_rows("gradients through time", list(COLUMNS.values()), table(rows), width=140)
    typer.echo("\n".join(map(str, [*files, report])))


def _open(source: str, inits: list[str]) -> list[ModelEntry]:
    """The model of a checkpoint, or the untrained models of a configuration, one per `init`."""
    from longrnn.hf.load import load_recurrent
    from longrnn.hf.names import resolve
    from longrnn.hf.tokenizer import load_tokenizer

    is_bundled = source in names("configs/train") and not Path(source).exists()
    if is_bundled or source.endswith((".yaml", ".yml")):
        return [_untrained(source, init) for init in inits or [None]]
    if inits:
        raise UserError(
            f"{source} is already trained, so --init does not apply to it: give a configuration "
            "(.yaml) or leave --init out"
        )
    model, folder = load_recurrent(source), resolve(source)
    # A checkpoint inside the folder of a run has its configuration one folder higher.
    recorded = read_recorded(folder) or read_recorded(folder.resolve().parent)
    return [ModelEntry(source, model, load_tokenizer(source), recorded.get("task"))]


def _untrained(source: str, init: str | None) -> ModelEntry:
    """The model of a configuration before its first step."""
    from longrnn.training.config import configured
    from longrnn.training.distributed import build_accelerator
    from longrnn.training.trainer import Trainer

    config = configured(source, [] if init is None else [f"model.mixer.init={init}"])
    trainer = Trainer(config, build_accelerator(config), quiet=True)
    name = source if init is None else f"{Path(source).stem}, {init}"
    return ModelEntry(name, trainer.model.under(None), trainer.tokenizer, config.task)
