"""`longrnn finetune`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longrnn.cli.options import Quiet, lock_output, pick_device
from longrnn.cli.train import divided, echo_main, terminable
from longrnn.errors import UserError
from longrnn.units import parse_length

if TYPE_CHECKING:
    from longrnn.training.config import TrainConfig

# The folder of the evaluation, in that of the run.
EVALUATION = "evaluation"


def finetune(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="Name of an embedded checkpoint, a folder, or organisation/model on the Hub. Then "
            "values that override the configuration, such as max_steps=500.",
            metavar="[CHECKPOINT] [KEY=VALUE]...",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Documents to train on: a folder, a file, a dataset or a corpus; may be given "
            "several times.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        str, typer.Option(help="Tokens of a row, or of a segment of a carried state.")
    ] = "4k",
    initial_state: Annotated[
        str,
        typer.Option(help="What rows start from: carry, pass, fitted_noise, random_noise or zero."),
    ] = "carry",
    validation: Annotated[
        list[str] | None,
        typer.Option(
            help="Held-out documents, as for --data.",
            show_default="documents with 5 % of the tokens of --data",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(help="Folder of the run.", show_default="runs/CHECKPOINT-finetuned"),
    ] = None,
    evaluate_to: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTH",
            help="Longest length of the evaluation before and after.",
            show_default="16 × --length",
        ),
    ] = None,
    no_evaluate: Annotated[
        bool, typer.Option("--no-evaluate", help="Train, and leave the evaluation out.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume", metavar="RUN", help="Continue the run in this folder and its evaluation."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the configuration, check it, do one step, and print its peak memory.",
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Fine-tune a checkpoint on long documents, and evaluate it before and after.

    The data is tokenized with the tokenizer of the checkpoint, and a part of it is held out. The
    run validates on that part, and ends with its best model. OUTPUT/train.yaml is the
    configuration, which `longrnn train` takes; OUTPUT/evaluation/report.html compares the loss on
    held-out data and the recall of passkeys before and after.

    Example: longrnn finetune state-spaces/mamba2-370m --data books --length 4k --initial-state pass
    """
    from longrnn.config import dump_config
    from longrnn.programs import continuing
    from longrnn.training.train import dry_run as check
    from longrnn.training.train import resumed, train

    checkpoint, overrides = divided(words or [], resume, "finetune CHECKPOINT --data FOLDER")
    longest = None if evaluate_to is None else parse_length(evaluate_to)
    with terminable():
        if resume is not None:
            settings = resumed(resume, overrides, quiet=quiet)
        else:
            from longrnn.training.finetune import finetuning

            if not data:
                raise UserError(
                    "nothing to train on is given: add --data with a file, folder or dataset"
                )
            settings = finetuning(
                checkpoint,
                data,
                length=parse_length(length),
                initial_state=initial_state,
                validation=validation or (),
                output_dir=output,
                overrides=overrides,
                processes=int(os.environ.get("WORLD_SIZE", "1")),
            )
        if settings.validation is None and not no_evaluate:
            raise UserError(
                "the evaluation reads validation data, and there is none: give --validation, or "
                "add --no-evaluate"
            )
        if dry_run:
            echo_main(dump_config(settings))
            memory = check(settings, quiet=quiet)
            echo_main(f"The configuration is valid. Peak memory of a step: {memory}.")
            return
        continuing(Path(settings.output_dir))
        done = train(settings, resume=resume, quiet=quiet)
        echo_main(f"{done.folder}: trained for {done.rows[-1]['step']} steps")
        if not no_evaluate:
            _evaluate(settings, longest, quiet)


def _evaluate(config: TrainConfig, longest: int | None, quiet: bool) -> None:
    """Compares the final model of a run with the checkpoint that it started from."""
    from longrnn.cli.evaluate import compare_and_report
    from longrnn.data import TASKS
    from longrnn.evaluation.before_after import write_suite
    from longrnn.hf.opened import open_checkpoint
    from longrnn.processes import on_main
    from longrnn.training.models import tokenizer_of

    folder = lock_output(Path(config.output_dir) / EVALUATION)
    assert isinstance(config.validation, dict)
    assert config.init_from is not None
    tokenizer = tokenizer_of(config)
    held_out = TASKS.build(config.validation, tokenizer)
    how = {"length": config.length.max, "longest": longest}
    suite = on_main(lambda: write_suite(held_out, tokenizer, folder, **how))
    device = pick_device("auto")
    models = [
        open_checkpoint(config.init_from, name="before", device=device),
        open_checkpoint(config.output_dir, name="after", device=device),
    ]
    compare_and_report(models, [suite], folder, quiet=quiet)
