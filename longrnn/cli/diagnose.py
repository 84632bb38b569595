"""`longrnn diagnose states` and `gradients`, `longrnn calibrate` and `longrnn repair`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from longrnn.bundled import names
from longrnn.cli.command import Argument
from longrnn.cli.options import Model, Output, Source, TrainLength, pick_device
from longrnn.config import read_recorded
from longrnn.console import print_rows, say
from longrnn.errors import UserError
from longrnn.evaluation.options import TextFile, Texts
from longrnn.options import Options, Tokens
from longrnn.units import format_length

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
    from longrnn.checkpoints.names import training_length
    from longrnn.checkpoints.opened import open_checkpoint
    from longrnn.diagnostics.states import diagnose
    from longrnn.evaluation.texts import read_documents
    from longrnn.reporting.states import summary, write_report

    name = model.under(model.checkpoint)
    folder = output.folder("states", [name], states.texts)
    opened = open_checkpoint(name, device=pick_device(model.device))
    count = states.length * states.newlines
    documents = read_documents(states.texts, opened.tokenizer, opened.model, count)
    trained = states.train_length or training_length(model.checkpoint)
    diagnosis = diagnose(
        opened.model, documents, states.length, train_length=trained, checkpoint=model.checkpoint
    )
    files = write_report(diagnosis, folder)
    say(summary(diagnosis), diagnosis.about["criterion"], *files)


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
    from longrnn.reporting.training import GRADIENT_COLUMNS, table, write_gradients

    sources = list(dict.fromkeys(gradients.sources))
    folder = output.folder("gradients", sources, gradients.texts)
    models = [(source, *_open(source)) for source in sources]
    first, _, _, spec = models[0]
    if gradients.texts:
        spec = {"kind": "text", "data": list(map(str, gradients.texts))}
    if spec is None:
        raise UserError(f"the training task of {first} is not known: give --text")
    rows = []
    for name, model, tokenizer, _ in models:
        task = TASKS.build(spec, tokenizer)
        records = measure(model, task, gradients.length, name=name)
        rows += [{"model": name, **row} for row in records]
    about = {
        "models": {name: model.fingerprint() for name, model, _, _ in models},
        "task": str(spec),
        "length": gradients.length,
    }
    report, *files = write_gradients(about, rows, folder)
    print_rows("gradients through time", list(GRADIENT_COLUMNS.values()), table(rows))
    say(*files, report)


def _open(source: str) -> tuple[TrainableLM, Tokenizer, dict[str, Any] | None]:
    """Return the model, the tokenizer and the training task of a checkpoint or configuration."""
    import torch

    from longrnn.checkpoints.load import load_editable
    from longrnn.checkpoints.names import CheckpointName, resolve
    from longrnn.checkpoints.tokenizer import load_tokenizer
    from longrnn.data import TASKS
    from longrnn.training.config import configured
    from longrnn.training.models import build, tokenizer_of

    try:
        name, *overrides = [source] if Path(source).exists() else shlex.split(source)
    except ValueError as error:  # an open quote, or nothing but spaces
        raise UserError(
            f"{source!r} is neither a checkpoint nor a configuration with overrides: write it as "
            "'CONFIG KEY=VALUE'"
        ) from error
    if overrides or name in names("configs/train") or name.endswith((".yaml", ".yml")):
        config = configured(name, overrides)
        tokenizer = tokenizer_of(config)
        torch.manual_seed(config.seed)
        model = build(config, TASKS.build(config.task, tokenizer))
        return model.under(None), tokenizer, config.task
    model: Any = load_editable(source)
    folder = resolve(CheckpointName.parse(source).checkpoint)
    # A checkpoint inside the folder of a run has its configuration one folder higher.
    recorded = read_recorded(folder) or read_recorded(folder.resolve().parent)
    return model, load_tokenizer(source), recorded.get("task")


class CalibrateOptions(Source, TrainLength, Output):
    """What is calibrated, and on which texts."""

    texts: list[TextFile]
    """A text to calibrate on, which is not evaluated on; may be given several times."""
    method: str
    """What to calibrate: state_norm, token_filter, scale_delta, scale_decay, power_decay, fit or
    per_head; with settings as in 'state_norm(margin=0.7)' or 'per_head(keys=3)'."""
    target_length: Tokens | None = None
    """Length at which the model should work; all methods but state_norm need it."""
    output: Path | None = None
    """File to write, ending in .yaml (default: METHOD.yaml, or METHOD-TARGET_LENGTH.yaml, in
    results/calibrate/CHECKPOINT--TEXTS)."""


def calibrate(options: CalibrateOptions) -> None:
    """Calibrate a mitigation on text and write a file that --mitigation accepts.

    Example: longrnn calibrate passkey-tiny-short --text book.txt --method state_norm
    """
    from longrnn.diagnostics.calibrate import calibrate as run
    from longrnn.diagnostics.job import Job
    from longrnn.mitigations import mitigation

    name = re.sub(r"[^\w.-]+", "-", options.method).strip("-")
    name += "" if options.target_length is None else f"-{format_length(options.target_length)}"
    if options.output is not None and options.output.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--mitigation reads .yaml files, and {options.output} has another ending: give an "
            "--output that ends in .yaml"
        )
    path = options.folder("calibrate", [options.checkpoint], options.texts, f"{name}.yaml")
    job = Job.open(
        options.checkpoint,
        options.texts,
        options.train_length,
        options.target_length or 0,
        device=pick_device(options.device),
        weights_file=path.with_suffix(".safetensors"),
    )
    job.write(path, run(job, options.method))
    say(shorten(str(mitigation(path)), 100, placeholder=" …"), path)


class RepairOptions(Source, TrainLength):
    """What is repaired, on which texts, and for how long."""

    texts: list[TextFile] = Field(min_length=1)
    """A text to choose on; of several, the last one proves, of a single one its second half."""
    length: Tokens = 65536
    """Number of tokens up to which the model should work."""
    budget: Annotated[float, Field(gt=0)] = 30.0
    """Minutes for attempts; one that would not fit is left out."""
    folds_only: bool = False
    """Try only what folds into the weights, so that other programs run the checkpoint."""
    keys: bool = False
    """Choose and prove by passkeys in the texts too."""


def repair(options: RepairOptions, output: Output) -> None:
    """Say what is wrong with a model at a length, try repairs, and write the best with its proof.

    Writes the checkpoint (in the layout that it had if the repair folds into weights), the
    mitigation, and report.html with before and after on text that the choice did not see. The same
    command continues after an interruption.

    Example: longrnn repair collapse-tiny --text book.txt --text other.txt --length 64k
    """
    from longrnn.diagnostics.repair import repair as start
    from longrnn.progress import is_quiet

    folder = output.folder("repair", [options.checkpoint], options.texts)
    given = {**options.model_dump(), "device": pick_device(options.device)}
    done = start(**given, output=folder, quiet=is_quiet())
    lines = [*done.sentences[2:], done.checkpoint, done.mitigation, done.report]
    say(*(line for line in lines if line is not None))
