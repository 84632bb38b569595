"""`longrnn finetune`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from longrnn.cli.options import Checkpoint, Quiet, lock_output, pick_device
from longrnn.cli.train import terminable
from longrnn.units import parse_length

if TYPE_CHECKING:
    from longrnn.training.trainer import Trainer

# The folder of the evaluation, in that of the run.
EVALUATION = "evaluation"


def finetune(
    checkpoint: Checkpoint,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Values that override the configuration, such as max_steps=500.",
            metavar="[KEY=VALUE]...",
        ),
    ] = None,
    data: Annotated[
        list[str],
        typer.Option(
            help="Documents to train on: a folder, a file, a dataset or a corpus; may be given "
            "several times.",
            show_default=False,
        ),
    ] = [],  # noqa: B006  # typer copies it
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
        bool, typer.Option("--resume", help="Resume the run and its evaluation.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the configuration and its data, and print the configuration and the memory "
            "of a step; train nothing.",
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
    from longrnn.errors import UserError
    from longrnn.training.finetuning import ROWS, finetuning, fitting_rows

    if not data:
        raise UserError("nothing to train on is given: add --data with a file, folder or dataset")
    longest = None if evaluate_to is None else parse_length(evaluate_to)
    settings = finetuning(
        checkpoint,
        data,
        length=parse_length(length),
        initial_state=initial_state,
        validation=validation or (),
        output_dir=output,
        overrides=overrides or (),
    )
    if not settings.validation and not no_evaluate:
        raise UserError(
            "the evaluation reads validation data, and there is none: give --validation, or add "
            "--no-evaluate"
        )
    fits = not any(override.startswith(f"{ROWS}=") for override in overrides or ())
    if dry_run:
        from longrnn.training.checks import check

        if fits:
            rows = fitting_rows(settings, settings.num_processes or 1, quiet=quiet)
            settings.per_device_train_batch_size = rows
        check(settings, quiet=quiet)
        typer.echo(f"{dump_config(settings)}The configuration is valid.")
        return
    with terminable():
        from longrnn.training.processes import build_accelerator, on_main
        from longrnn.training.trainer import Trainer

        if fits:
            accelerator = build_accelerator(settings)
            processes = accelerator.num_processes
            rows = on_main(accelerator, lambda: fitting_rows(settings, processes, quiet=quiet))
            settings.per_device_train_batch_size = rows
        trainer = Trainer(settings, resume=resume, quiet=quiet)
        trainer.train()
        if not trainer.accelerator.is_main_process:
            return
        folder = trainer.output_dir
        typer.echo(f"{folder}: trained for {trainer.step} steps")
        typer.echo(f"{folder / 'train.yaml'}: the configuration, for `longrnn train`")
        if not no_evaluate:
            _evaluate(trainer, longest, quiet)


def _evaluate(trainer: Trainer, longest: int | None, quiet: bool) -> None:
    """Compares the final model of a run with the checkpoint that it started from."""
    from longrnn.cli.evaluate import compare_and_report
    from longrnn.evaluation.before_after import write_suite
    from longrnn.hf.opened import open_checkpoint

    config, folder = trainer.config, lock_output(trainer.output_dir / EVALUATION)
    assert trainer.validation is not None
    assert config.init_from is not None
    suite = write_suite(
        trainer.validation.task,
        trainer.tokenizer,
        folder,
        length=config.length.max,
        longest=longest,
    )
    best = trainer.validation.best
    step = best.step if best is not None and config.load_best_model_at_end else trainer.step
    device = pick_device("auto")
    models = [
        open_checkpoint(config.init_from, name="before", device=device),
        open_checkpoint(str(trainer.output_dir), name=f"step-{step}", device=device),
    ]
    compare_and_report(models, [suite], folder, quiet=quiet)
