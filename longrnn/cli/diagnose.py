"""`longrnn diagnose states`."""

from __future__ import annotations

import typer

from longrnn.cli.options import Model, Output, lock_output, pick_device, results_folder
from longrnn.errors import UserError
from longrnn.evaluation.options import Texts
from longrnn.options import Tokens


class States(Texts):
    """Which texts are read, and where their states are measured."""

    length: Tokens = 65536
    """Number of tokens of each text to read."""


def states(model: Model, states: States, output: Output) -> None:
    """Find the heads that collapse beyond the training length or keep the first tokens.

    Writes states.jsonl (by position), diagnosis.yaml (which lists the collapsing heads, so that a
    mitigation can be limited to them), pictures and report.html.

    Example: longrnn diagnose states passkey-tiny-short --text book.txt --length 64k
    """
    from longrnn.diagnostics.states import diagnose
    from longrnn.diagnostics.states_report import summary, write_report
    from longrnn.evaluation.texts import newlines, read_documents, warn_if_calibrated_on
    from longrnn.hf.load import load
    from longrnn.hf.names import required_training_length
    from longrnn.hf.tokenizer import load_tokenizer

    if not states.texts and not states.newlines:
        raise UserError("give --text FILE, --newlines, or both")
    checkpoint = model.checkpoint
    trained = states.train_length or required_training_length(checkpoint)
    spec = "+".join(filter(None, (checkpoint, model.mitigation)))
    diagnosed = load(spec, device=pick_device(model.device))
    tokenizer = load_tokenizer(checkpoint)
    documents = read_documents(states.texts, tokenizer, diagnosed)
    warn_if_calibrated_on(diagnosed, {document.sha256: document.name for document in documents})
    if states.newlines:
        documents.append(newlines(tokenizer, states.length))
    folder = output.output or results_folder("states", [checkpoint], model.mitigation)
    found = diagnose(
        diagnosed,
        documents,
        states.length,
        train_length=trained,
        output=lock_output(folder),
        checkpoint=checkpoint,
        quiet=output.quiet,
    )
    report, *pictures = write_report(found, folder)
    typer.echo(f"{summary(found)}\n{found.about['criterion']}")
    files = [folder / name for name in ("states.jsonl", "diagnosis.yaml")]
    typer.echo("\n".join(map(str, [*files, *pictures, report])))
