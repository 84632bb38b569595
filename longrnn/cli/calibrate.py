"""`longrnn calibrate`."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import shorten

import typer

from longrnn.cli.options import Source, TrainLength, check_place, pick_device, results_folder
from longrnn.errors import UserError
from longrnn.evaluation.options import TextFile
from longrnn.options import Tokens
from longrnn.units import format_length


class CalibrateOptions(Source, TrainLength):
    """What is calibrated, and on which texts."""

    texts: list[TextFile]
    """A text to calibrate on, which is not evaluated on; may be given several times."""
    method: str
    """What to calibrate: state_norm, token_filter, scale_delta, scale_decay, power_decay, fit or
    per_head; with settings as in 'state_norm(margin=0.7)' or 'per_head(keys=3)'."""
    target_length: Tokens | None = None
    """Length at which the model should work; all methods but state_norm need it."""
    output: Path | None = None
    """File to write, ending in .yaml (default: METHOD.yaml, or METHOD-TARGET_LENGTH.yaml, in
    results/calibrate/CHECKPOINT--TEXTS)."""


def calibrate(options: CalibrateOptions) -> None:
    """Calibrate a mitigation on text and write a file that --mitigation accepts.

    Example: longrnn calibrate passkey-tiny-short --text book.txt --method state_norm
    """
    from longrnn.diagnostics.calibrate import calibrate as run
    from longrnn.diagnostics.job import Job
    from longrnn.locks import hold
    from longrnn.mitigations import mitigation

    checkpoint = options.checkpoint
    folder = results_folder("calibrate", [checkpoint], variant=options.texts)
    method = re.sub(r"[^\w.-]+", "-", options.method).strip("-")
    ending = "" if options.target_length is None else f"-{format_length(options.target_length)}"
    path = options.output or folder / f"{method}{ending}.yaml"
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--mitigation reads .yaml files, and {path} has another ending: give an --output that "
            "ends in .yaml"
        )
    check_place(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file by --output")
    hold(path, instead="choose another --output")
    target, device = options.target_length or 0, pick_device(options.device)
    job = Job.open(
        checkpoint, options.texts, options.train_length, target, device=device, quiet=False
    )
    members = run(job, options.method)
    job.write(path, members)
    typer.echo(f"{shorten(str(mitigation(path)), 100, placeholder=' …')}\n{path}")
