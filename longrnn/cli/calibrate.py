"""`longrnn calibrate`."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer

from longrnn.cli.command import Argument
from longrnn.cli.options import check_place, pick_device, results_folder
from longrnn.errors import UserError
from longrnn.evaluation.options import TextFile
from longrnn.options import Options, Tokens
from longrnn.units import format_length


class CalibrateOptions(Options):
    """What is calibrated, and on which texts."""

    checkpoint: Annotated[str, Argument("CHECKPOINT")]
    """Name of an embedded checkpoint, or a folder."""
    texts: list[TextFile]
    """A text to calibrate on, which is not evaluated on; may be given several times."""
    method: str
    """What to calibrate: state_norm, token_filter, scale_delta, scale_decay, power_decay, fit or
    per_head; with settings as in 'state_norm(margin=0.7)' or 'per_head(keys=3)'."""
    train_length: Tokens | None = None
    """Length that the model was trained on (default: that of its train.yaml)."""
    target_length: Tokens | None = None
    """Length at which the model should work; all methods but state_norm need it."""
    device: str = "auto"
    """Where to run: cpu, cuda, cuda:1, auto."""
    output: Path | None = None
    """File to write, ending in .yaml (default: METHOD.yaml, or METHOD-TARGET_LENGTH.yaml, in
    results/calibrate/CHECKPOINT--TEXTS)."""


def calibrate(options: CalibrateOptions) -> None:
    """Calibrate a mitigation on text and write a file that --mitigation accepts.

    Example: longrnn calibrate passkey-tiny-short --text book.txt --method state_norm
    """
    from longrnn.diagnostics.calibrate import calibrate as measure
    from longrnn.evaluation.texts import read_documents
    from longrnn.hf.load import load_editable
    from longrnn.hf.names import required_training_length
    from longrnn.hf.tokenizer import load_tokenizer
    from longrnn.locks import hold
    from longrnn.mitigations import mitigation
    from longrnn.mitigations.base import Calibration
    from longrnn.mitigations.spec import write_calibration

    checkpoint = options.checkpoint
    trained = options.train_length or required_training_length(checkpoint)
    texts = "-".join(text.stem for text in options.texts)
    folder = results_folder("calibrate", [checkpoint], variant=texts)
    method = re.sub(r"[^\w.-]+", "-", options.method).strip("-")
    target = "" if options.target_length is None else f"-{format_length(options.target_length)}"
    path = options.output or folder / f"{method}{target}.yaml"
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--mitigation reads .yaml files, and {path} has another ending: give an --output that "
            "ends in .yaml"
        )
    check_place(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file by --output")
    hold(path, instead="choose another --output")
    model = load_editable(checkpoint, device=pick_device(options.device))
    tokenizer = load_tokenizer(checkpoint)
    documents = read_documents(options.texts, tokenizer, model)
    members = measure(
        model,
        documents,
        options.method,
        train_length=trained,
        target_length=options.target_length,
        tokenizer=tokenizer,
    )
    hashes = tuple(document.sha256 for document in documents)
    write_calibration(path, members, Calibration(str(path), model.fingerprint(), trained, hashes))
    typer.echo(f"{shorten(str(mitigation(path)), 100, placeholder=' …')}\n{path}")
