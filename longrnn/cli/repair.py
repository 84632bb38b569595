"""`longrnn repair`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from longrnn.cli.command import Argument
from longrnn.cli.options import lock_output, pick_device, results_folder
from longrnn.evaluation.options import TextFile
from longrnn.options import Options, Tokens


class RepairOptions(Options):
    """What is repaired, on which texts, and for how long."""

    checkpoint: Annotated[str, Argument("CHECKPOINT")]
    """Name of an embedded checkpoint, a folder in any layout, or organisation/model on the Hub."""
    texts: list[TextFile] = Field(min_length=1)
    """A text to choose on; of several, the last one proves, of a single one its second half."""
    length: Tokens = 65536
    """Number of tokens up to which the model should work."""
    train_length: Tokens | None = None
    """Length that the model was trained on (default: that of its train.yaml)."""
    budget: Annotated[float, Field(gt=0)] = 30.0
    """Minutes for attempts; one that would not fit is left out."""
    folds_only: bool = False
    """Try only what folds into the weights, so that other programs run the checkpoint."""
    keys: bool = False
    """Choose and prove by passkeys in the texts too."""
    device: str = "auto"
    """Where to run: cpu, cuda, cuda:1, auto."""
    output: Path | None = None
    """Folder for the results (default: results/repair/CHECKPOINT--TEXTS)."""


def repair(options: RepairOptions) -> None:
    """Say what is wrong with a model at a length, try repairs, and write the best with its proof.

    Writes the checkpoint (in the layout that it had if the repair folds into weights), the
    mitigation, and report.html with before and after on text that the choice did not see. The same
    command continues after an interruption.

    Example: longrnn repair collapse-tiny --text book.txt --text other.txt --length 64k
    """
    from longrnn.diagnostics.repair import repair as start
    from longrnn.progress import is_quiet

    texts = "-".join(text.stem for text in options.texts)
    output = options.output or results_folder("repair", [options.checkpoint], variant=texts)
    done = start(
        options.checkpoint,
        options.texts,
        lock_output(output),
        length=options.length,
        train_length=options.train_length,
        budget=options.budget,
        folds_only=options.folds_only,
        keys=options.keys,
        device=pick_device(options.device),
        quiet=is_quiet(),
    )
    lines = [*done.sentences[2:], done.checkpoint, done.mitigation, done.report]
    typer.echo("\n".join(str(line) for line in lines if line is not None))
