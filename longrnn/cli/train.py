"""`longrnn train`, `finetune`, `linearize` and `launch`."""

from __future__ import annotations

import signal
from pathlib import Path
from textwrap import fill, indent
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer
from pydantic import Field

from longrnn.cli.command import Argument
from longrnn.cli.options import lock_output, pick_device
from longrnn.console import say
from longrnn.errors import Terminated, UserError
from longrnn.imports import import_options
from longrnn.options import Options, Tokens
from longrnn.processes import is_main
from longrnn.progress import is_quiet
from longrnn.text import Documents
from longrnn.training.finetune import Recipe
from longrnn.training.memory_recipe import MemoryRecipe
from longrnn.units import counted

if TYPE_CHECKING:
    from longrnn.checkpoints.opened import OpenCheckpoint
    from longrnn.training.config import TrainConfig

# The folder of the run that this process has begun, and the command that continues it from there.
CURRENT: dict[Path, list[str]] = {}
# The commands that several processes run together.
COMMANDS = ("train", "finetune", "linearize", "eval", "compare")
# All options before the command are accelerate's, and those after it the command's, `--help` too.
LAUNCH_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class Resumable(Options):
    """How a run begins."""

    resume: Path | None = None
    """Continue the run in this folder, which has its configuration, up to max_steps. A checkpoint
    in it, such as RUN/checkpoint-00000500, is continued in another output_dir."""
    dry_run: bool = False
    """Check the run, do two steps, and print their memory and speed, and the time of the run."""


class Training(Resumable):
    """What is trained."""

    words: Annotated[list[str], Argument("[CONFIG] [KEY=VALUE]")] = Field([])
    """A training configuration: a YAML file, or the name of a bundled file such as reverse_small.
    Then values that override it, such as length.max=512."""
    help_config: bool = False
    """Print the keys of a configuration with defaults."""


def train(training: Training) -> None:
    """Train a model from a configuration file.

    `longrnn doctor` prints the folder of the bundled configurations. Ctrl-C and SIGTERM finish and
    save the current step, and print the command that resumes.

    Example: longrnn train passkey_tiny_short max_steps=500 output_dir=runs/try
    """
    from longrnn.training.config import config_keys, configured
    from longrnn.training.train import resumed

    if training.help_config:
        for key, default, meaning in config_keys():
            say(f"{key} = {default}", indent(fill(meaning, 92), "    "))
        return
    config, overrides = divided(training.words, training.resume, "train CONFIG")
    end_at_sigterm()
    if training.resume is None:
        run(configured(config, overrides), training)
    else:
        run(resumed(training.resume, overrides, quiet=is_quiet()), training)


class Evaluated(Options):
    """How what was trained is evaluated."""

    evaluate_to: Tokens | None = None
    """Longest length of the evaluation (default: 16 × --length; linearize: 4 × --length)."""
    no_evaluate: bool = False
    """Train, and leave the evaluation out."""

    def refuse_short(self, length: int) -> None:
        """Raise a UserError for an evaluation below the length of the training."""
        if self.evaluate_to is not None and self.evaluate_to < length:
            raise UserError(
                f"--evaluate-to {self.evaluate_to} is below the length of the training, --length "
                f"{length}: give at least that"
            )


class Finetuning(Evaluated, Resumable, Recipe):
    """What is fine-tuned on which documents."""

    words: Annotated[list[str], Argument("[CHECKPOINT] [KEY=VALUE]")] = Field([])
    """Name of an embedded checkpoint, a folder, or organisation/model on the Hub. Then values that
    override the configuration, such as max_steps=500."""


def finetune(options: Finetuning) -> None:
    """Fine-tune a checkpoint on long documents, and evaluate it before and after.

    The data is tokenized with the tokenizer of the checkpoint, and a part of it is held out. The
    run validates on that part. OUTPUT/train.yaml is the
    configuration, which `longrnn train` takes; OUTPUT/evaluation/report.html compares the loss on
    held-out data and the recall of passkeys before and after.

    Example: longrnn finetune state-spaces/mamba2-370m --data books --length 4k --initial-state pass
    """
    from longrnn.config import dump_config
    from longrnn.training.train import resumed

    checkpoint, overrides = divided(
        options.words, options.resume, "finetune CHECKPOINT --data FILE"
    )
    end_at_sigterm()
    if options.resume is not None:
        if given := Recipe.model_fields.keys() & options.model_fields_set:
            raise UserError(
                f"a resumed run has its own --{min(given).replace('_', '-')}: leave it out, or "
                "change a value of the configuration by key=value"
            )
        config = resumed(options.resume, overrides, quiet=is_quiet())
    elif options.data:
        config = options.config(checkpoint, overrides)
    else:
        raise UserError("nothing to train on is given: add --data with a file, folder or dataset")
    if not options.no_evaluate and (config.validation is None or config.init_from is None):
        raise UserError("validation or init_from is missing to compare with: add --no-evaluate")
    options.refuse_short(config.length.max)
    if options.dry_run and is_main():
        say(dump_config(config))
    if run(config, options) and not options.no_evaluate:
        _evaluate(config, options.evaluate_to)


class Linearizing(Evaluated, MemoryRecipe):
    """Which transformer gets a memory, and what it learns from."""

    words: Annotated[list[str], Argument("[MODEL] [KEY=VALUE]")] = Field([])
    """A transformer with the layers of a LLaMA: a folder, a .gguf file or organisation/model. Then
    values that override the configuration of both stages, such as max_steps=200."""
    text: list[Documents] = Field([])
    """Documents to train on: a folder, file, dataset or corpus; may be given several times."""
    output: Path = Path("runs/linearized")
    """Folder of the runs; the same command continues them."""


def linearize(options: Linearizing) -> None:
    """Give a transformer a recurrent memory, so that it reads any length in constant memory.

    Attention is limited to a window and the first tokens, and a Mamba-2 beside it in each layer
    learns what the window removes, while the transformer's own weights stay: first layer by layer,
    then its predictions. OUTPUT/teacher is the result, a Falcon-H1 that transformers runs too, or
    with --replace a GraniteMoeHybrid, where the attention of some layers is a Mamba-2.
    OUTPUT/evaluation/report.html compares the transformer, the window alone, the memory, and the
    same memory limited to the window and beside full attention, on held-out text.

    Example: longrnn linearize smollm2 --text books --output runs/memory max_steps=200
    """
    from longrnn.checkpoints.opened import open_checkpoint
    from longrnn.training.linearize import linearize as start

    if not options.words:
        raise UserError(
            "the first argument is missing: write `longrnn linearize MODEL --text FILE`"
        )
    model, *overrides = options.words
    options.refuse_short(options.length)
    if not options.text and not any(word.startswith("task") for word in overrides):
        raise UserError("nothing to train on is given: add --text with a file, folder or dataset")
    end_at_sigterm()
    made = start(
        model,
        options.text,
        options.output,
        **options.model_dump(include={*MemoryRecipe.model_fields}),
        overrides=overrides,
        quiet=is_quiet(),
    )
    if is_main():
        spent = f"{made.minutes:.1f}"
        spent += "" if options.budget is None else f" of {options.budget:g}"
        say(f"{made.trained}: the transformer with its memory, after {spent} minutes")
    if not options.no_evaluate and made.config.validation is not None:
        device = pick_device("auto")
        models = [open_checkpoint(of, name=name, device=device) for name, of in made.names.items()]
        longest = options.evaluate_to or 4 * options.length
        _measure(models, made.config, options.output / "evaluation", longest)


def _evaluate(config: TrainConfig, longest: int | None) -> None:
    """Compare the final model of a run with the checkpoint that it started from."""
    from longrnn.checkpoints.opened import open_checkpoint
    from longrnn.mitigations.spec import ATTENTION_WINDOW

    tuned = open_checkpoint(config.output_dir, name="after", device=pick_device("auto"))
    # Attention of a hybrid reads as many tokens in both, so that training alone differs.
    window = getattr(tuned.model, "attention_window", None)
    same = None if window is None else f"{ATTENTION_WINDOW}{window}"
    untuned = open_checkpoint(str(config.init_from), same, name="before", device=tuned.device)
    _measure([untuned, tuned], config, Path(config.output_dir) / "evaluation", longest)


def _measure(
    models: list[OpenCheckpoint], config: TrainConfig, output: Path, longest: int | None
) -> None:
    """Measure models on what a run held out, and show the tables.

    Args:
        models: to compare, with one tokenizer.
        config: of the run.
        output: folder of the evaluation.
        longest: of the evaluation; None for the default of `write_suite`.
    """
    from longrnn.cli.evaluate import measure_and_show
    from longrnn.data import TASKS
    from longrnn.evaluation.before_after import without_failed_passkeys, write_suite
    from longrnn.processes import on_main
    from longrnn.training.models import tokenizer_of

    folder, tokenizer = lock_output(output, "folder"), tokenizer_of(config)
    held_out = TASKS.build(cast(Any, config.validation), tokenizer)
    how = {"length": config.length.max, "longest": longest}
    evaluations = on_main(lambda: write_suite(held_out, tokenizer, folder, **how))
    measure_and_show(models, without_failed_passkeys(models, evaluations, folder), folder)


class Launch(Options):
    """What is started, and how."""

    words: Annotated[list[str], Argument("OPTION... COMMAND ARGUMENT")] = Field([])
    """Options of `accelerate launch`; then train, finetune, linearize, eval or compare, with its
    arguments."""


def launch(launch: Launch) -> None:
    """Train or evaluate in several processes, on one machine or several.

    The options are those of `accelerate launch`: --config_file takes a YAML file of accelerate or
    the name of a bundled file such as cpu2 or gpu8 (by default what `accelerate config` wrote, or
    one process per GPU); --num_processes counts processes on all machines together, --cpu uses no
    GPU; --num_machines, --machine_rank, --main_process_ip and --main_process_port join machines.

    An error that all processes have is printed once. The exit code is 0 if the command ended, or if
    its run was saved after SIGTERM; 130 after Ctrl-C; otherwise that of the process that failed.

    Example: longrnn launch --cpu --num_processes 2 train reverse_small
    """
    from longrnn.training.launch import launch as start

    places = [launch.words.index(name) for name in COMMANDS if name in launch.words]
    if not places:
        raise UserError(
            "launch takes its options and then train, finetune, linearize, eval or compare: write "
            "`longrnn launch --config_file FILE train CONFIG`"
        )
    first = min(places)
    program = [launch.words[first], *import_options(), *launch.words[first + 1 :]]
    raise typer.Exit(start(launch.words[:first], program))


def run(config: TrainConfig, options: Resumable) -> bool:
    """Train, or only try one step; return whether the run ended."""
    from longrnn.training.train import dry_run
    from longrnn.training.train import train as start

    if options.dry_run:
        cost = dry_run(config, options.resume, quiet=is_quiet())
        if is_main():
            say(f"The configuration is valid. {cost}.")
        return False
    if options.resume != (folder := Path(config.output_dir)):
        CURRENT.clear()
        CURRENT[folder] = continuation(options, folder)
    done = start(config, resume=options.resume, quiet=is_quiet())
    if is_main():
        say(f"{done.folder}: trained for {counted(done.rows[-1]['step'], 'step')}")
    return True


def continuation(options: Resumable, folder: Path) -> list[str]:
    """Return the command that continues a new run, with the options that the run does not hold."""
    words = ["finetune" if isinstance(options, Finetuning) else "train", "--resume", str(folder)]
    if isinstance(options, Finetuning):
        words += ["--no-evaluate"] if options.no_evaluate else []
        words += ["--evaluate-to", str(options.evaluate_to)] if options.evaluate_to else []
    return words


def divided(words: list[str], resume: Path | None, usage: str) -> tuple[str, list[str]]:
    """Return the first argument, which a resumed run does not have, and the overrides after it.

    Args:
        words: all arguments.
        resume: the run to continue.
        usage: how the command is written without it.

    Raises:
        UserError: the first argument is missing.
    """
    if resume is not None:
        return "", words
    if not words:
        raise UserError(f"the first argument is missing: write `longrnn {usage}`, or --resume RUN")
    return words[0], words[1:]


def end_at_sigterm() -> None:
    """Make SIGTERM raise `Terminated` from now on, as Ctrl-C raises KeyboardInterrupt."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated("what was finished is kept")

    signal.signal(signal.SIGTERM, leave)
