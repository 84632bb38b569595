"""`longrnn diagnose …`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longrnn.cli.capacity import capacity
from longrnn.cli.gradients import gradients
from longrnn.cli.memory import memory
from longrnn.cli.options import (
    Checkpoint,
    Device,
    Mitigation,
    Quiet,
    TrainLength,
    lock_output,
    pick_device,
    results_folder,
    training,
    training_length,
    warn_if_calibrated_on,
)
from longrnn.errors import UserError
from longrnn.units import parse_length

if TYPE_CHECKING:
    from longrnn.diagnostics.states import Diagnosis

app = typer.Typer(
    help="Look into a model.",
    epilog="Example: longrnn diagnose states passkey-tiny-short --newlines",
    no_args_is_help=True,
)
app.command("memory")(memory)
app.command("capacity")(capacity)
app.command("gradients")(gradients)
# Rows of the table on screen; the report has them all.
SHOWN = 30


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
            help="A prompt of newlines only.",
            show_default="beside the texts",
        ),
    ] = None,
    length: Annotated[str, typer.Option(help="Tokens of a prompt.")] = "64k",
    train_length: TrainLength = None,
    every: Annotated[int, typer.Option(help="Tokens between readings.")] = 128,
    first: Annotated[int, typer.Option(help="Tokens whose share of the state is followed.")] = 128,
    mitigation: Mitigation = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the results.", show_default="results/states/CHECKPOINT"),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Which heads collapse beyond the training length, and which hold on to their first tokens.

    Writes states.jsonl, diagnosis.yaml (whose collapsing heads a mitigation can be given to),
    pictures and report.html.

    Example: longrnn diagnose states passkey-tiny-short --text book.txt --length 64k
    """
    from longrnn.diagnostics import states as measure
    from longrnn.diagnostics.states_report import summary, write_report
    from longrnn.evaluation.texts import read_documents
    from longrnn.hf.loading import load_recurrent
    from longrnn.hf.specs import mitigated, split_spec
    from longrnn.hf.tokenizer import load_tokenizer

    if not text and not newlines:
        raise UserError("give --text FILE, --newlines, or both")
    tokens, trained = parse_length(length), training_length(checkpoint, train_length)
    if trained is None:
        raise UserError(f"{checkpoint} does not say its training length: give --train-length")
    name, own = split_spec(checkpoint)
    specs = [spec for spec in (own, mitigation) if spec is not None]
    model = mitigated(load_recurrent(name, device=pick_device(device)), specs or None)
    tokenizer = load_tokenizer(name)
    documents = read_documents(text or [], tokenizer, model)
    warn_if_calibrated_on(model, documents)
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
        every=every,
        first=first,
        quiet=quiet,
    )
    report, *pictures = write_report(diagnosis, folder)
    print_states(diagnosis)
    typer.echo(f"{summary(diagnosis)}\n{diagnosis.about['criterion']}")
    written = [folder / "states.jsonl", folder / "diagnosis.yaml", *pictures, report]
    typer.echo("\n".join(map(str, written)))


@app.command()
def stability(
    run: Annotated[Path, typer.Argument(help="output_dir of a run on a reverse task, or sort.")],
    n: Annotated[
        int, typer.Option("--n", help="Triplets of inputs per condition and checkpoint.")
    ] = 1024,
    seed: Annotated[int, typer.Option(help="Of the triplets.")] = 0,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Compare the gradients of inputs that share a token, along the checkpoints of a run.

    The gradient is the Jacobian of the last output with respect to the state after the first token.
    It is compared between inputs that share the first token, and between inputs that share all
    other tokens (arXiv 2402.00236): 1 for equal gradients, 0 for orthogonal ones. A run on
    reverse_dual_frequency is measured with frequent and rare tokens separately. Keep more
    checkpoints with save_steps and save_total_limit.

    Example: longrnn diagnose stability runs/reverse-small --n 64
    """
    from longrnn.cli.tables import print_stability
    from longrnn.studies.stability import along_checkpoints
    from longrnn.tasks import TASKS
    from longrnn.tasks.sequence import Transduction

    trained = training(run)
    task = TASKS.build(trained["task"], None) if "task" in trained else None
    length = trained.get("length", {}).get("max")
    if not isinstance(task, Transduction) or length is None:
        raise UserError(
            f"{run} is not a run on a task such as reverse or sort: give the output_dir of one"
        )
    target = pick_device(device)
    print_stability(
        along_checkpoints(run, task, length=length, n=n, seed=seed, device=target, quiet=quiet), n
    )


def print_states(diagnosis: Diagnosis) -> None:
    """Prints the heads that collapse or are global, on each prompt."""
    from rich.console import Console
    from rich.table import Table

    heads = [*diagnosis.collapsing(), *diagnosis.global_heads()]
    chosen = [finding for finding in diagnosis.findings if [finding.layer, finding.head] in heads]
    if not chosen:
        return
    table = Table(title="heads that collapse or are global", title_justify="left")
    for name in ("layer", "head"):
        table.add_column(name, justify="right")
    for name in ("prompt", "left its range", "from position", "norm, end / inside", "retention"):
        table.add_column(name)
    for finding in chosen[:SHOWN]:
        table.add_row(
            str(finding.layer),
            str(finding.head),
            finding.prompt,
            ", ".join(finding.left) or "–",
            "–" if finding.onset is None else f"{finding.onset:,}",
            f"{finding.growth:.3g}",
            "–" if finding.retention is None else f"{finding.retention:.3g}",
        )
    if len(chosen) > SHOWN:
        table.caption = f"and {len(chosen) - SHOWN} more rows in the report"
    console = Console()
    Console(width=max(console.width, 110)).print(table)
