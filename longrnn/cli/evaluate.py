"""`longrnn eval …`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longrnn.cli.options import Checkpoint, Device, Quiet, pick_device
from longrnn.errors import UserError
from longrnn.units import format_length, parse_lengths

if TYPE_CHECKING:
    from longrnn.evaluation.results import Row

app = typer.Typer(
    help="Measure a checkpoint.",
    epilog="Example: longrnn eval passkey passkey-tiny --lengths 1k,4k",
    no_args_is_help=True,
)


@app.command()
def passkey(
    checkpoints: Annotated[
        list[str], typer.Argument(help="Names of embedded checkpoints, or folders.")
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
    batch_size: Annotated[int, typer.Option(help="Prompts in one batch.")] = 16,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Passkey retrieval over lengths × depths, with keys that training never saw.

    An interrupted run goes on where it stopped; more lengths or a larger n add to what is there.
    Several checkpoints are asked the same questions.

    Example: longrnn eval passkey passkey-tiny --lengths 1k,4k,16k --n 20
    """
    from longrnn.diagnostics.plots import passkey_heat_map
    from longrnn.evaluation import passkey as measure
    from longrnn.hf.loading import load
    from longrnn.hf.tokenizer import load_tokenizer

    asked_lengths, asked_depths = parse_lengths(lengths), _depths(depths)
    target = pick_device(device)
    rows = measure.evaluate(
        [
            measure.Subject(name, load(name, device=target), load_tokenizer(name))
            for name in dict.fromkeys(checkpoints)
        ],
        lengths=asked_lengths,
        depths=asked_depths,
        n=n,
        output=(folder := output or _folder("passkey", checkpoints)) / "results.jsonl",
        seed=seed,
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

    trained = _training(resolve(checkpoint))
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
    folder = output or _folder("reverse", [checkpoint])
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


def print_passkey(name: str, rows: Sequence[Row]) -> None:
    """Prints accuracy by length (down) and depth (across), with Wilson intervals."""
    from rich.console import Console
    from rich.table import Table

    from longrnn.evaluation.passkey import summarise

    cells = summarise(rows)
    depths = sorted({depth for _, depth in cells if depth is not None})
    table = Table(title=f"{name}: passkeys recalled [95 % Wilson interval]", title_justify="left")
    table.add_column("length", justify="right")
    table.add_column("n", justify="right")
    for depth in depths:
        table.add_column(f"depth {depth:.0%}")
    table.add_column("all depths")
    for length in sorted({length for length, _ in cells}):
        total = cells[length, None]
        row = [str(cells[length, depth]) for depth in depths]
        count = f"{len(depths)} × {total.n // len(depths)}"
        table.add_row(format_length(length), count, *row, str(total))
    # A table that is not on a terminal keeps its columns whole.
    console = Console()
    Console(width=max(console.width, 24 + 20 * (len(depths) + 1))).print(table)


def _folder(evaluation: str, checkpoints: Sequence[str]) -> Path:
    """Where results go when nobody says: one folder for each set of checkpoints."""
    names = "+".join(Path(name).resolve().name for name in checkpoints)
    return Path("results") / evaluation / names


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


def _training(folder: Path) -> dict[str, Any]:
    """The configuration that a checkpoint was trained with, or nothing."""
    import yaml

    path = folder / "train.yaml"
    return yaml.safe_load(path.read_text()) if path.is_file() else {}
