"""`longrnn calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.options import (
    Checkpoint,
    Device,
    Quiet,
    TrainLength,
    pick_device,
)
from longrnn.cli.results_folders import results_folder
from longrnn.errors import UserError


def calibrate(
    checkpoint: Checkpoint,
    text: Annotated[
        list[Path],
        typer.Option(
            help="A text to calibrate on, not one to evaluate on; may be given several times.",
            show_default=False,
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            help="What to calibrate: state_norm, token_filter, scale_delta, scale_decay or "
            "power_decay."
        ),
    ],
    train_length: TrainLength = None,
    target_length: Annotated[
        str | None,
        typer.Option(
            help="Length at which the model should work; all methods but state_norm need it."
        ),
    ] = None,
    windows: Annotated[int, typer.Option(help="Maximum number of windows of text.")] = 32,
    margin: Annotated[
        float, typer.Option(help="state_norm: ratio of the threshold to the largest norm seen.")
    ] = 1.0,
    quantile: Annotated[
        float | None,
        typer.Option(
            help="token_filter: share of tokens to filter out.",
            show_default="1 − training length / target length",
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            help="scale_delta: instead of a search, divide the step sizes by target length / "
            "training length in this share of the heads, those with the longest receptive fields."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of the search for factors.")] = 30,
    seed: Annotated[int, typer.Option(help="Random seed of the search.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="YAML file to write.", show_default="results/calibrate/CHECKPOINT/METHOD.yaml"
        ),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Calibrate a mitigation on text and write a file that --mitigation accepts.

    Example: longrnn calibrate passkey-tiny-short --text book.txt --method state_norm
    """
    from longrnn.evaluation.calibrate import Settings
    from longrnn.evaluation.calibrate import calibrate as measure
    from longrnn.evaluation.texts import read_documents
    from longrnn.hf.loading import load_editable
    from longrnn.hf.tokenizer import load_tokenizer
    from longrnn.hf.training_length import required_training_length
    from longrnn.locks import Lock
    from longrnn.mitigations import mitigation
    from longrnn.mitigations.base import Calibration
    from longrnn.mitigations.spec import write_calibration
    from longrnn.units import parse_length

    path = output or results_folder("calibrate", [checkpoint]) / f"{method}.yaml"
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--mitigation reads .yaml files, and {path} is not one: give an --output that ends in "
            ".yaml"
        )
    settings = Settings(
        train_length=required_training_length(checkpoint, train_length),
        target_length=None if target_length is None else parse_length(target_length),
        windows=windows,
        margin=margin,
        quantile=quantile,
        share=share,
        steps=steps,
        seed=seed,
    )
    Lock.of_file(path, instead="choose another --output").hold_until_exit()
    model = load_editable(checkpoint, device=pick_device(device))
    documents = read_documents(text, load_tokenizer(checkpoint))
    member = measure(model, documents, method, settings, quiet=quiet)
    record = Calibration(
        source=str(path),
        fingerprint=model.fingerprint(),
        length=settings.train_length,
        text_sha256=tuple(document.sha256 for document in documents),
    )
    write_calibration(path, [member], record)
    typer.echo(f"{mitigation(path)}\n{path}")
