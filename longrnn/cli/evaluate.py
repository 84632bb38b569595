"""`longrnn eval …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.options import (
    Checkpoint,
    Device,
    Mitigation,
    Quiet,
    TrainLength,
    load_variant,
    mitigated,
    pick_device,
    refuse_long,
    results_folder,
    training,
    training_length,
    warn_if_calibrated_on,
)
from longrnn.cli.tables import print_forgetting, print_passkey, print_perplexity
from longrnn.errors import UserError
from longrnn.units import format_length, parse_length, parse_lengths

app = typer.Typer(
    help="Measure a checkpoint.",
    epilog="Example: longrnn eval passkey passkey-tiny --lengths 1k,4k",
    no_args_is_help=True,
)


@app.command()
def passkey(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            help="Names of embedded checkpoints, or folders; CHECKPOINT+MITIGATION for one under a "
            "mitigation."
        ),
    ],
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "256,1k,4k,16k",
    depths: Annotated[
        str, typer.Option(help="How many depths, evenly spaced from 0 to 1, or their list 0,0.5,1.")
    ] = "5",
    n: Annotated[int, typer.Option("--n", help="Prompts per cell.")] = 10,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the results.", show_default="results/passkey/NAMES"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the keys.")] = 0,
    filler: Annotated[
        Path | None,
        typer.Option(help="A text file to hide the keys in.", show_default="The grass is green. …"),
    ] = None,
    n_keys: Annotated[
        int, typer.Option(help="Keys in one prompt, numbered, of which one is asked.")
    ] = 1,
    mitigation: Mitigation = None,
    chunk_select: Annotated[
        str | None,
        typer.Option(help="Answer from the chunk of so many tokens that is surest."),
    ] = None,
    naive: Annotated[
        bool,
        typer.Option("--naive", help="Read every prompt by itself: slower, for comparison."),
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Prompts in one batch.")] = 16,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Passkey retrieval over lengths × depths, with keys that training never saw.

    An interrupted run goes on where it stopped; more lengths or a larger n add to what is there.
    Several checkpoints are asked the same questions.

    Example: longrnn eval passkey passkey-tiny 'passkey-tiny+forget_more' --lengths 1k,16k --n 20
    """
    from longrnn.diagnostics.plots import passkey_heat_map
    from longrnn.evaluation import passkey as measure
    from longrnn.evaluation.texts import read_documents
    from longrnn.hf.tokenizer import load_tokenizer

    asked_lengths, asked_depths = parse_lengths(lengths), _depths(depths)
    target = pick_device(device)
    subjects = []
    for variant in dict.fromkeys(checkpoints):
        name, model = load_variant(variant, mitigation, target)
        if chunk_select is None:
            refuse_long(model, max(asked_lengths))
        label = variant if mitigation is None else f"{variant}+{mitigation}"
        subjects.append(measure.Subject(label, model, load_tokenizer(name)))
        if filler is not None:
            warn_if_calibrated_on(model, read_documents([filler], subjects[-1].tokenizer, model))
    chunk = None if chunk_select is None else parse_length(chunk_select)
    more = [mitigation, None if chunk is None else f"chunk_select={chunk}"]
    suffix = "+".join(part for part in more if part is not None) or None
    folder = output or results_folder("passkey", checkpoints, suffix)
    rows = measure.evaluate(
        subjects,
        lengths=asked_lengths,
        depths=asked_depths,
        n=n,
        output=folder / "results.jsonl",
        seed=seed,
        filler=filler,
        n_keys=n_keys,
        chunk=chunk,
        naive=naive,
        batch_size=batch_size,
        quiet=quiet,
    )
    passkey_heat_map(rows, folder / "heatmap.png")
    for name, one in measure.by_model(rows).items():
        print_passkey(name, one)
    typer.echo(f"{folder / 'results.jsonl'}\n{folder / 'heatmap.png'}")


@app.command()
def reverse(
    checkpoint: Checkpoint,
    vocab_size: Annotated[
        int | None, typer.Option(help="V of the task.", show_default="as in training")
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens to reverse.", show_default="as in training")
    ] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", help="Held-out sequences.", show_default="all, at most 1024"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the results.", show_default="results/reverse/CHECKPOINT"),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Reverse ordering on held-out sequences: token accuracy, exact match, edit distance.

    Example: longrnn eval reverse runs/reverse-small --length 16
    """
    from longrnn.evaluation import reverse as measure
    from longrnn.hf.loading import load, resolve
    from longrnn.tasks import TASKS, Reverse

    trained = training(resolve(checkpoint))
    options = dict(trained.get("task", {}))
    if options.pop("kind", None) != "reverse":
        options = {}
    elif length is None:
        length = trained["length"]["max"]
    if vocab_size is not None:
        options["vocab_size"] = vocab_size
    if "vocab_size" not in options or length is None:
        raise UserError(f"{checkpoint} was not trained on reverse: give --vocab-size and --length")
    task = Reverse(**TASKS.check("reverse", options))
    model = load(checkpoint, device=pick_device(device))
    folder = output or results_folder("reverse", [checkpoint])
    rows = measure.evaluate(
        model,
        task,
        length=length,
        n=n,
        output=folder / "results.jsonl",
        quiet=quiet,
    )
    for name, estimate in measure.summarise(rows).items():
        typer.echo(f"{name:<16}{estimate}  (n = {estimate.n}, 95 % interval)")
    typer.echo(str(folder / "results.jsonl"))


@app.command()
def perplexity(
    checkpoint: Checkpoint,
    text: Annotated[
        list[Path],
        typer.Option(help="A text file; may be given several times.", show_default=False),
    ],
    length: Annotated[str, typer.Option(help="Tokens of a window of text.")] = "64k",
    by_position: Annotated[
        bool,
        typer.Option(
            "--by-position", help="Loss by position, its plot, and whether the model forgets."
        ),
    ] = False,
    train_length: TrainLength = None,
    mitigation: Mitigation = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the results.", show_default="results/perplexity/CHECKPOINT"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Windows in one batch.")] = 8,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Loss on long texts, in all and by position, with intervals over documents.

    A text longer than the length gives several windows, each a document of its own with a new
    state. An interrupted run goes on where it stopped; more texts or lengths add to what is there.

    Example: longrnn eval perplexity passkey-tiny --text book.txt --length 64k --by-position
    """
    from longrnn.diagnostics.plots import loss_by_position
    from longrnn.evaluation import perplexity as measure
    from longrnn.evaluation.texts import read_documents
    from longrnn.hf.loading import load
    from longrnn.hf.tokenizer import load_tokenizer

    window, trained = parse_length(length), training_length(checkpoint, train_length)
    model = mitigated(load(checkpoint, device=pick_device(device)), mitigation)
    refuse_long(model, window)
    documents = read_documents(text, load_tokenizer(checkpoint), model)
    warn_if_calibrated_on(model, documents)
    folder = output or results_folder("perplexity", [checkpoint], mitigation)
    rows = measure.evaluate(
        model,
        documents,
        length=window,
        output=folder / "results.jsonl",
        batch_size=batch_size,
        quiet=quiet,
    )
    print_perplexity(rows, by_position)
    written = [folder / "results.jsonl"]
    if by_position:
        print_forgetting(rows, trained, model.vocab_size)
        written.append(folder / f"loss_by_position_{format_length(window)}.png")
        loss_by_position(rows, written[-1], trained)
    typer.echo("\n".join(map(str, written)))


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
            f"{text!r} are no depths: write how many (5), or a list such as 0,0.5,1"
        ) from error
