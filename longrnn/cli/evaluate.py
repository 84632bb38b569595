"""`longrnn eval …`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.harness import SETTINGS, harness
from longrnn.cli.options import (
    Checkpoint,
    Checkpoints,
    Device,
    Mitigation,
    Quiet,
    SomeTexts,
    TrainLength,
    lock_output,
    pick_placement,
    warn_if_calibrated_on,
)
from longrnn.cli.perplexity import PerplexityOptions, measure_all, measure_one, parse_overlap
from longrnn.cli.results_folders import results_folder
from longrnn.cli.sequences import evaluate_sequences
from longrnn.errors import UserError
from longrnn.processes import is_main, start
from longrnn.results import Row
from longrnn.units import parse_length, parse_lengths

app = typer.Typer(
    help="Evaluate checkpoints.",
    epilog="Example: longrnn eval passkey passkey-tiny --lengths 1k,4k",
    no_args_is_help=True,
)
app.command(context_settings=SETTINGS)(harness)


@app.callback()
def processes_of_the_launch() -> None:
    start()


@app.command()
def passkey(
    checkpoints: Checkpoints,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "256,1k,4k,16k",
    depths: Annotated[
        str | None,
        typer.Option(
            help="Number of depths, evenly spaced from 0 to 1, or a list such as 0,0.5,1.",
            show_default="5",
        ),
    ] = None,
    insert_every: Annotated[
        str | None,
        typer.Option(
            help="Instead of depths: put the key after 0, 1, 2, … times this many tokens of filler."
        ),
    ] = None,
    insert_at: Annotated[
        str | None,
        typer.Option(help="Instead of depths: tokens of filler before the key, such as 0,8k,16k."),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Prompts per cell.")] = 10,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the results.",
            show_default="results/passkey/NAMES, or results/passkey-absolute/NAMES",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the keys.")] = 0,
    filler: Annotated[
        Path | None,
        typer.Option(help="A text file to hide the keys in.", show_default="The grass is green. …"),
    ] = None,
    n_keys: Annotated[
        int, typer.Option(help="Numbered keys in one prompt; the question is about one of them.")
    ] = 1,
    mitigation: Mitigation = None,
    chunk_select: Annotated[
        str | None,
        typer.Option(
            help="Split the prompt into chunks of this many tokens, and take the answer with the "
            "lowest entropy."
        ),
    ] = None,
    naive: Annotated[
        bool,
        typer.Option(
            "--naive", help="Process every prompt separately instead of sharing prefixes: slower."
        ),
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Prompts in one batch.")] = 16,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Evaluate passkey retrieval over lengths × depths, with keys that training never saw.

    The same command resumes an interrupted run; more lengths or a larger n add to the results. All
    checkpoints get the same prompts. Insertion points instead of depths separate the effect of the
    key's position from that of its distance to the question.

    Example: longrnn eval passkey passkey-tiny 'passkey-tiny+forget_more' --lengths 1k,16k --n 20
    """
    from longrnn.evaluation import passkey as measure
    from longrnn.evaluation.passkey_grid import Grid, insertion_points
    from longrnn.evaluation.tables import print_cost
    from longrnn.evaluation.texts import read_documents
    from longrnn.hf.opened import open_checkpoint

    prompt_lengths = parse_lengths(lengths)
    key_depths, inserted = _places(depths, insert_at, insert_every)
    step = None if insert_every is None else parse_length(insert_every)
    target = pick_placement(device)
    names = dict.fromkeys(checkpoints)
    models = [open_checkpoint(name, mitigation, device=target) for name in names]
    texts = [] if filler is None else [filler]
    for one in models:
        warn_if_calibrated_on(one.model, read_documents(texts, one.tokenizer, one.model))
    if step is not None:
        tokenizers = [one.tokenizer for one in models]
        inserted = insertion_points(step, max(prompt_lengths), tokenizers)
    chunk = None if chunk_select is None else parse_length(chunk_select)
    options = {} if chunk is None else {"chunk_select": str(chunk)}
    evaluation = "passkey-absolute" if inserted else "passkey"
    folder = lock_output(output or results_folder(evaluation, checkpoints, mitigation, options))
    grid = Grid(prompt_lengths, n, key_depths, inserted, seed, filler, n_keys)
    tasks = measure.tasks_of(models, grid)
    measure.refuse_out_of_reach(models, grid, tasks=tasks, chunk=chunk)
    rows = measure.evaluate(
        models,
        grid,
        output=folder / "results.jsonl",
        tasks=tasks,
        chunk=chunk,
        naive=naive,
        batch_size=batch_size,
        quiet=quiet,
    )
    if not is_main():
        return
    picture = _show_passkeys(rows, folder, inserted=bool(inserted))
    if chunk is None and not naive:
        print_cost(measure.cost(models, grid, tasks=tasks))
    typer.echo(f"{folder / 'results.jsonl'}\n{picture}")


def _show_passkeys(rows: Sequence[Row], folder: Path, *, inserted: bool) -> Path:
    """Prints and draws recall by length, and by depth or insertion point; returns the picture."""
    from longrnn.diagnostics.plots import passkey_by_position, passkey_heat_map
    from longrnn.evaluation.passkey import by_model
    from longrnn.evaluation.tables import print_passkey, print_passkey_inserted

    picture = folder / ("positions.png" if inserted else "heatmap.png")
    draw, show = (
        (passkey_by_position, print_passkey_inserted)
        if inserted
        else (passkey_heat_map, print_passkey)
    )
    draw(rows, picture)
    for name, own in by_model(rows).items():
        show(name, own)
    return picture


VocabSize = Annotated[
    int | None, typer.Option(help="Vocabulary size of the task.", show_default="as in training")
]
SequenceLength = Annotated[
    str | None, typer.Option(help="Length of a sequence in tokens.", show_default="as in training")
]
HeldOut = Annotated[
    int | None,
    typer.Option("--n", help="Number of held-out sequences.", show_default="all, at most 1024"),
]


@app.command()
def reverse(
    checkpoint: Checkpoint,
    vocab_size: VocabSize = None,
    length: SequenceLength = None,
    n: HeldOut = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the results.", show_default="results/reverse/CHECKPOINT"),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Evaluate reverse ordering on held-out sequences: token accuracy, exact match, edit distance.

    Example: longrnn eval reverse runs/reverse-small --length 16
    """
    evaluate_sequences(checkpoint, "reverse", vocab_size, length, n, output, device, quiet)


@app.command("task")
def task_(
    checkpoint: Checkpoint,
    task: Annotated[
        str | None,
        typer.Option(
            help="Name of the task, such as sort, recall or reverse_dual_frequency.",
            show_default="as in training",
        ),
    ] = None,
    vocab_size: VocabSize = None,
    length: SequenceLength = None,
    n: HeldOut = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the results.", show_default="results/TASK/CHECKPOINT"),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Evaluate a sequence task on held-out sequences: token accuracy, exact match, edit distance.

    For reverse_dual_frequency also the accuracy of rare and of frequent tokens, each among rare and
    among frequent tokens.

    Example: longrnn eval task runs/sort --length 16
    """
    evaluate_sequences(checkpoint, task, vocab_size, length, n, output, device, quiet)


@app.command()
def perplexity(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            help="Names of embedded checkpoints, or folders; CHECKPOINT+MITIGATION evaluates a "
            "checkpoint under a mitigation. The others are compared with the first one.",
            show_default=False,
        ),
    ],
    text: SomeTexts = None,
    newlines: Annotated[
        bool,
        typer.Option(
            "--newlines",
            help="Also measure a text of newlines only, the simplest one.",
        ),
    ] = False,
    length: Annotated[str, typer.Option(help="Length of a window of text in tokens.")] = "64k",
    context: Annotated[
        str | None,
        typer.Option(
            help="With --stride: score in overlapping windows of this many tokens, each read from "
            "an empty state, instead of carrying the state through the whole window.",
        ),
    ] = None,
    stride: Annotated[
        str | None,
        typer.Option(
            help="With --context: tokens between the starts of two overlapping windows, which are "
            "scored in the later one."
        ),
    ] = None,
    by_position: Annotated[
        bool,
        typer.Option(
            "--by-position",
            help="Also print and plot the loss by position, and test whether the model forgets.",
        ),
    ] = False,
    train_length: TrainLength = None,
    mitigation: Mitigation = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the results.", show_default="results/perplexity/NAMES"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Windows of text in one batch.")] = 8,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Evaluate the loss on long texts, overall and by position, with intervals over windows.

    A text that is longer than --length is split into windows, each of which starts from a new
    state. The same command resumes an interrupted run; more texts or lengths add to the results.
    Several models are scored on the same bytes, whatever their tokenizers; the difference of each
    model from the first has a bootstrap interval over texts. Transformers are usually scored in
    overlapping windows (--context and --stride).

    Example: longrnn eval perplexity passkey-tiny --text book.txt --length 64k --by-position
    """
    variants = list(dict.fromkeys(checkpoints))
    if not text and not newlines:
        raise UserError("there is nothing to measure: give --text FILE, --newlines, or both")
    overlap = parse_overlap(context, stride)
    named = {} if overlap is None else {"overlap": f"{overlap.context}_{overlap.stride}"}
    folder = lock_output(output or results_folder("perplexity", variants, mitigation, named))
    options = PerplexityOptions(
        text or [],
        parse_length(length),
        by_position,
        train_length,
        batch_size,
        quiet,
        overlap,
        newlines,
    )
    target = pick_placement(device)
    if len(variants) == 1:
        written = measure_one(variants[0], mitigation, target, options, folder)
    else:
        written = measure_all(variants, mitigation, target, options, folder)
    if written:
        typer.echo("\n".join(map(str, written)))


def _places(
    depths: str | None, insert_at: str | None, insert_every: str | None
) -> tuple[list[float], list[int]]:
    """Returns depths and insertion points, one of them empty; both are with `insert_every`."""
    if sum(given is not None for given in (depths, insert_at, insert_every)) > 1:
        raise UserError("give one of --depths, --insert-every and --insert-at")
    if insert_every is not None:
        return [], []
    if insert_at is not None:
        items = [item.strip() for item in insert_at.split(",")]
        return [], sorted({0 if item == "0" else parse_length(item) for item in items})
    return _depths("5" if depths is None else depths), []


def _depths(text: str) -> list[float]:
    from longrnn.evaluation.passkey import evenly_spaced

    try:
        if "," in text or "." in text:
            return [float(item) for item in text.split(",")]
        return evenly_spaced(int(text))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            f"{text!r} is not a valid list of depths: write how many (5), or a list such as 0,0.5,1"
        ) from error
