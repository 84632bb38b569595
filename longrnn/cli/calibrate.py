"""`longrnn calibrate`."""

from __future__ import annotations

from pathlib import Path

import typer
from pydantic import Field

from longrnn.cli.options import Output, pick_device
from longrnn.cli.results_folders import results_folder
from longrnn.errors import UserError
from longrnn.evaluation.settings import Settings
from longrnn.options import Options


class Calibration(Options):
    """What is calibrated, and on which texts."""

    checkpoint: str = Field(description="Name of an embedded checkpoint, or a folder.")
    texts: list[Path] = Field(
        description="A text to calibrate on, not one to evaluate on; may be given several times."
    )
    method: str = Field(
        description="What to calibrate: state_norm, token_filter, scale_delta, scale_decay, "
        "power_decay or per_head."
    )
    device: str = Field(default="auto", description="Where to run: cpu, cuda, cuda:1, auto.")


def calibrate(calibration: Calibration, settings: Settings, output: Output) -> None:
    """Calibrate a mitigation on text and write a file that --mitigation accepts.

    Example: longrnn calibrate passkey-tiny-short --text book.txt --method state_norm
    """
    from longrnn.evaluation.calibrate import calibrate as measure
    from longrnn.evaluation.texts import read_documents
    from longrnn.hf.load import load_editable
    from longrnn.hf.tokenizer import load_tokenizer
    from longrnn.hf.training_length import required_training_length
    from longrnn.locks import Lock
    from longrnn.mitigations import mitigation
    from longrnn.mitigations.base import Calibration as Record
    from longrnn.mitigations.spec import write_calibration

    checkpoint, method = calibration.checkpoint, calibration.method
    path = output.output or results_folder("calibrate", [checkpoint]) / f"{method}.yaml"
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--mitigation reads .yaml files, and {path} is not one: give an --output that ends in "
            ".yaml"
        )
    if settings.train_length is None:
        settings.train_length = required_training_length(checkpoint)
    settings.check()
    Lock.of_file(path, instead="choose another --output").hold_until_exit()
    model = load_editable(checkpoint, device=pick_device(calibration.device))
    tokenizer = load_tokenizer(checkpoint)
    documents = read_documents(calibration.texts, tokenizer, model)
    members = measure(model, documents, method, settings, tokenizer=tokenizer, quiet=output.quiet)
    record = Record(
        source=str(path),
        fingerprint=model.fingerprint(),
        length=settings.trained(),
        text_sha256=tuple(document.sha256 for document in documents),
    )
    write_calibration(path, members, record)
    typer.echo(f"{mitigation(path)}\n{path}")
