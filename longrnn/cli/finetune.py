"""`longrnn finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from longrnn.cli.command import Argument
from longrnn.cli.options import lock_output, pick_device
from longrnn.cli.train import Resumable, divided, echo_main, end_at_sigterm, run
from longrnn.errors import UserError
from longrnn.options import Tokens

if TYPE_CHECKING:
    from longrnn.training.config import TrainConfig

# The folder of the evaluation, in that of the run.
EVALUATION = "evaluation"


class Finetuning(Resumable):
    """What is fine-tuned on which documents."""

    words: Annotated[list[str], Argument("[CHECKPOINT] [KEY=VALUE]")] = Field([])
    """Name of an embedded checkpoint, a folder, or organisation/model on the Hub. Then values that
    override the configuration, such as max_steps=500."""
    data: list[str] = Field([])
    """Documents to train on: a folder, a file, a dataset or a corpus; may be given several times.
    """
    length: Tokens = 4096
    """Tokens of a row, or of a segment of a carried state."""
    initial_state: str = "carry"
    """What rows start from: carry, pass, fitted_noise, random_noise or zero."""
    validation: list[str] = Field([])
    """Held-out documents, as for --data (default: documents with 5 % of the tokens of --data)."""
    output: str | None = None
    """Folder of the run (default: runs/CHECKPOINT-finetuned)."""
    evaluate_to: Tokens | None = None
    """Longest length of the evaluation before and after (default: 16 × --length)."""
    no_evaluate: bool = False
    """Train, and leave the evaluation out."""


def finetune(options: Finetuning) -> None:
    """Fine-tune a checkpoint on long documents, and evaluate it before and after.

    The data is tokenized with the tokenizer of the checkpoint, and a part of it is held out. The
    run validates on that part. OUTPUT/train.yaml is the
    configuration, which `longrnn train` takes; OUTPUT/evaluation/report.html compares the loss on
    held-out data and the recall of passkeys before and after.

    Example: longrnn finetune state-spaces/mamba2-370m --data books --length 4k --initial-state pass
    """
    from longrnn.config import dump_config
    from longrnn.training.finetune import finetuning
    from longrnn.training.train import resumed

    usage = "finetune CHECKPOINT --data FOLDER"
    checkpoint, overrides = divided(options.words, options.resume, usage)
    end_at_sigterm()
    if options.resume is not None:
        config = resumed(options.resume, overrides, quiet=options.quiet)
    elif options.data:
        config = finetuning(
            checkpoint,
            options.data,
            length=options.length,
            initial_state=options.initial_state,
            validation=options.validation,
            output_dir=options.output,
            overrides=overrides,
        )
    else:
        raise UserError("nothing to train on is given: add --data with a file, folder or dataset")
    if config.validation is None and not options.no_evaluate:
        raise UserError(
            "the evaluation reads validation data, and there is none: give --validation, or "
            "add --no-evaluate"
        )
    if options.dry_run:
        echo_main(dump_config(config))
    if run(config, options) and not options.no_evaluate:
        _evaluate(config, options)


def _evaluate(config: TrainConfig, options: Finetuning) -> None:
    """Compares the final model of a run with the checkpoint that it started from."""
    from longrnn.cli.evaluate import measure
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
    how = {"length": config.length.max, "longest": options.evaluate_to}
    suite = on_main(lambda: write_suite(held_out, tokenizer, folder, **how))
    sources, device = {"before": config.init_from, "after": config.output_dir}, pick_device("auto")
    models = [open_checkpoint(one, name=name, device=device) for name, one in sources.items()]
    measure(models, suite.evaluations, folder, quiet=options.quiet)
