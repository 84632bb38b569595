"""`longrnn repair`."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import Field

from longrnn.cli.options import Output, Source, TrainLength, pick_device
from longrnn.evaluation.options import TextFile
from longrnn.options import Tokens


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

    folder = output.folder("repair", [options.checkpoint], variant=options.texts)
    done = start(
        options.checkpoint,
        options.texts,
        folder,
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
