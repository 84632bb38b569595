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
    results_folder,
    training_length,
)
from longrnn.errors import UserError


def calibrate(
    checkpoint: Checkpoint,
    text: Annotated[
        list[Path],
        typer.Option(
            help="A calibration text, not one that is measured on; may be given several times.",
            show_default=False,
        ),
    ],
    method: Annotated[
        str,
        typer.Option(help="state_norm, token_filter, scale_delta, scale_decay or power_decay."),
    ],
    train_length: TrainLength = None,
    target_length: Annotated[
        str | None, typer.Option(help="The length that shall work; needed by all but state_norm.")
    ] = None,
    windows: Annotated[int, typer.Option(help="At most so many windows of text.")] = 32,
    margin: Annotated[
        float, typer.Option(help="state_norm: the threshold over the largest norm seen.")
    ] = 1.0,
    quantile: Annotated[
        float | None,
        typer.Option(
            help="token_filter: share of tokens to filter.",
            show_default="1 − training length / target length",
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            help="scale_delta: no search; divide the steps by target / training length in this "
            "share of the heads, those with the longest receptive fields."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Of the search for factors.")] = 30,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(help="YAML file.", show_default="results/calibrate/CHECKPOINT/METHOD.yaml"),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Take the numbers of a mitigation from text, into a file that --mitigation accepts.

    Example: longrnn calibrate passkey-tiny-short --text book.txt --method state_norm
    """
    from longrnn.evaluation.calibrate import Settings
    from longrnn.evaluation.calibrate import calibrate as measure
    from longrnn.evaluation.texts import read_documents
    from longrnn.hf.loading import load_recurrent
    from longrnn.hf.tokenizer import load_tokenizer
    from longrnn.locks import Lock
    from longrnn.mitigations import mitigation
    from longrnn.mitigations.base import Calibration
    from longrnn.mitigations.spec import write_calibration
    from longrnn.units import parse_length

    path = output or results_folder("calibrate", [checkpoint]) / f"{method}.yaml"
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--mitigation knows files that end in .yaml, not {path}: give such an --output"
        )
    trained = training_length(checkpoint, train_length)
    if trained is None:
        raise UserError(f"{checkpoint} does not say its training length: give --train-length")
    settings = Settings(
        train_length=trained,
        target_length=None if target_length is None else parse_length(target_length),
        windows=windows,
        margin=margin,
        quantile=quantile,
        share=share,
        steps=steps,
        seed=seed,
    )
    Lock.of_file(path, instead="choose another --output").hold_until_exit()
    model = load_recurrent(checkpoint, device=pick_device(device))
    documents = read_documents(text, load_tokenizer(checkpoint), model)
    member = measure(model, documents, method, settings, quiet=quiet)
    known = Calibration(
        source=str(path),
        fingerprint=model.fingerprint(),
        length=settings.train_length,
        text_sha256=tuple(document.sha256 for document in documents),
    )
    write_calibration(path, [member], known)
    typer.echo(f"{mitigation(path)}\n{path}")
