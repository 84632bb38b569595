"""`longrnn diagnose …`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longrnn.cli import evaluate
from longrnn.cli.command import on_use
from longrnn.cli.gradients import gradients
from longrnn.cli.options import (
    Checkpoint,
    Device,
    Mitigation,
    Quiet,
    TrainLength,
    lock_output,
    pick_device,
)
from longrnn.cli.results_folders import results_folder
from longrnn.console import print_table
from longrnn.errors import UserError
from longrnn.units import parse_length

if TYPE_CHECKING:
    from longrnn.diagnostics.states import Diagnosis

app = typer.Typer(
    cls=on_use({"memory": partial(evaluate.enter, "memory")}),
    help="Look inside a model: states, memory, gradients.",
    epilog="Example: longrnn diagnose states passkey-tiny-short --newlines",
    no_args_is_help=True,
)
app.command("gradients")(gradients)
# At most this many rows are printed; the report has all of them.
MAX_ROWS = 30


@app.command()
def states(
    checkpoint: Checkpoint,
    text: Annotated[
        list[Path] | None, typer.Option(help="A text file; may be given several times.")
    ] = None,
    newlines: Annotated[
        bool | None,
        typer.Option(
            "--newlines/--no-newlines",
            help="Also measure a prompt of newlines only.",
            show_default="yes, if a text is given",
        ),
    ] = None,
    length: Annotated[str, typer.Option(help="Length of a prompt in tokens.")] = "64k",
    train_length: TrainLength = None,
    every: Annotated[str, typer.Option(help="Tokens between two measurements.")] = "128",
    first: Annotated[
        str, typer.Option(help="First tokens of the prompt whose share of the state is measured.")
    ] = "128",
    mitigation: Mitigation = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the results.", show_default="results/states/CHECKPOINT"),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Find the heads that collapse beyond the training length or keep the first tokens.

    Writes states.jsonl (by position), diagnosis.yaml (which lists the collapsing heads, so that a
    mitigation can be limited to them), pictures and report.html.

    Example: longrnn diagnose states passkey-tiny-short --text book.txt --length 64k
    """
    from longrnn.diagnostics import states as measure
    from longrnn.diagnostics.observe import check_observable
    from longrnn.diagnostics.states_report import summary, write_report
    from longrnn.evaluation.texts import read_documents, warn_if_calibrated_on
    from longrnn.hf.load import load_plain, mitigated
    from longrnn.hf.tokenizer import load_tokenizer
    from longrnn.hf.training_length import required_training_length

    if not text and not newlines:
        raise UserError("give --text FILE, --newlines, or both")
    tokens, trained = parse_length(length), required_training_length(checkpoint, train_length)
    plain, own = load_plain(checkpoint, device=pick_device(device))
    check_observable(plain)  # before a mitigation is refused
    model = mitigated(plain, [spec for spec in (own, mitigation) if spec is not None])
    tokenizer = load_tokenizer(checkpoint)
    documents = read_documents(text or [], tokenizer, model)
    warn_if_calibrated_on(model, {document.sha256: document.name for document in documents})
    prompts = [measure.text_prompt(document, tokens) for document in documents]
    if newlines is not False:
        prompts.append(measure.newlines(tokenizer, tokens))
    folder = lock_output(output or results_folder("states", [checkpoint], mitigation))
    diagnosis = measure.diagnose(
        model,
        prompts,
        train_length=trained,
        output=folder,
        checkpoint=checkpoint,
        every=parse_length(every),
        first=parse_length(first),
        quiet=quiet,
    )
    report, *pictures = write_report(diagnosis, folder)
    print_states(diagnosis)
    typer.echo(f"{summary(diagnosis)}\n{diagnosis.about['criterion']}")
    files = [folder / name for name in ("states.jsonl", "diagnosis.yaml")]
    written = [*files, *pictures, report]
    typer.echo("\n".join(map(str, written)))


def print_states(diagnosis: Diagnosis) -> None:
    """Prints one row for each prompt and head that collapses or is global."""
    from rich.table import Table

    heads = [*diagnosis.collapsing(), *diagnosis.global_heads()]
    chosen = [finding for finding in diagnosis.findings if (finding.layer, finding.head) in heads]
    if not chosen:
        return
    table = Table(title="heads that collapse or are global", title_justify="left")
    for name in ("layer", "head"):
        table.add_column(name, justify="right")
    for name in ("prompt", "left its range", "from position", "norm, end / inside", "retention"):
        table.add_column(name)
    for finding in chosen[:MAX_ROWS]:
        table.add_row(
            str(finding.layer),
            str(finding.head),
            diagnosis.prompts[finding.prompt].name,
            ", ".join(finding.left) or "–",
            "–" if finding.onset is None else f"{finding.onset:,}",
            f"{finding.growth:.3g}",
            f"{finding.retention:.3g}" if diagnosis.retention_is_defined() else "–",
        )
    if len(chosen) > MAX_ROWS:
        table.caption = f"and {len(chosen) - MAX_ROWS} more rows in the report"
    print_table(table, 110)
