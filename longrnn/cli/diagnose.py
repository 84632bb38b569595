"""`longrnn diagnose states`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from longrnn.cli.options import Model, Output, lock_output, pick_device, results_folder
from longrnn.console import print_rows
from longrnn.errors import UserError
from longrnn.evaluation.options import Texts
from longrnn.options import Tokens

if TYPE_CHECKING:
    from longrnn.diagnostics.states import Diagnosis

# At most this many rows are printed; the report has all of them.
MAX_ROWS = 30


class States(Texts):
    """Which prompts are read, and where their states are measured."""

    length: Tokens = 65536
    """Length of a prompt in tokens."""


def states(model: Model, states: States, output: Output) -> None:
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

    if not states.texts and not states.newlines:
        raise UserError("give --text FILE, --newlines, or both")
    checkpoint = model.checkpoint
    trained = states.train_length or required_training_length(checkpoint)
    plain, own = load_plain(checkpoint, device=pick_device(model.device))
    check_observable(plain)  # before a mitigation is refused
    diagnosed = mitigated(plain, [spec for spec in (own, model.mitigation) if spec is not None])
    tokenizer = load_tokenizer(checkpoint)
    documents = read_documents(states.texts, tokenizer, diagnosed)
    warn_if_calibrated_on(diagnosed, {document.sha256: document.name for document in documents})
    prompts = [measure.text_prompt(document, states.length) for document in documents]
    if states.newlines:
        prompts.append(measure.newlines(tokenizer, states.length))
    folder = output.output or results_folder("states", [checkpoint], model.mitigation)
    diagnosis = measure.diagnose(
        diagnosed,
        prompts,
        train_length=trained,
        output=lock_output(folder),
        checkpoint=checkpoint,
        quiet=output.quiet,
    )
    report, *pictures = write_report(diagnosis, folder)
    print_states(diagnosis)
    typer.echo(f"{summary(diagnosis)}\n{diagnosis.about['criterion']}")
    files = [folder / name for name in ("states.jsonl", "diagnosis.yaml")]
    typer.echo("\n".join(map(str, [*files, *pictures, report])))


def print_states(diagnosis: Diagnosis) -> None:
    """Prints one row for each prompt and head that collapses or is global."""
    heads = [*diagnosis.collapsing(), *diagnosis.global_heads()]
    chosen = [finding for finding in diagnosis.findings if (finding.layer, finding.head) in heads]
    if not chosen:
        return
    rows = [
        (
            str(finding.layer),
            str(finding.head),
            diagnosis.prompts[finding.prompt].name,
            ", ".join(finding.left) or "–",
            "–" if finding.onset is None else f"{finding.onset:,}",
            f"{finding.growth:.3g}",
            f"{finding.retention:.3g}" if diagnosis.retention_is_defined() else "–",
        )
        for finding in chosen[:MAX_ROWS]
    ]
    more = len(chosen) - len(rows)
    print_rows(
        "heads that collapse or are global",
        ("layer", "head", "prompt", "left its range", "from position", "norm, end / inside",
         "retention"),
        rows,
        width=110,
        caption=f"and {more} more rows in the report" if more else None,
    )  # fmt: skip
