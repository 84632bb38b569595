"""Compare all mitigations of state collapse, on books and on passkeys.

    longrnn train configs/train/books_collapse.yaml
    python scripts/study_state_collapse.py books runs/books-collapse \\
        --calibration data/war_and_peace.txt --text data/moby_dick.txt --text data/tom_sawyer.txt
    python scripts/study_state_collapse.py passkey passkey-tiny-short --lengths 256,4k,64k,256k,1M

Both commands calibrate on text that is not evaluated, then evaluate every mitigation and print a
table in Markdown. Results are written to `--output`; the same command resumes an interrupted study.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from longrnn import Mitigated, load_tokenizer, mitigation
from longrnn.errors import UserError
from longrnn.evaluation import passkey as recall
from longrnn.evaluation import perplexity as loss
from longrnn.evaluation.calibrate import METHODS, Settings, calibrate
from longrnn.evaluation.forgetting import forgetting
from longrnn.evaluation.passkey_grid import Grid
from longrnn.evaluation.texts import Document, read_documents
from longrnn.files import write_atomic
from longrnn.hf.loading import load_recurrent
from longrnn.hf.opened import OpenCheckpoint
from longrnn.hf.training_length import required_training_length
from longrnn.mitigations.base import Calibration
from longrnn.mitigations.spec import write_calibration
from longrnn.models import RecurrentLM
from longrnn.programs import new_app, run_script
from longrnn.tasks.passkey_prompts import FILLER
from longrnn.units import format_length, parse_length, parse_lengths

app = new_app()

Output = Annotated[Path, typer.Option(help="Folder for the results.")]


@app.command()
def books(
    checkpoint: str,
    calibration: Annotated[list[Path], typer.Option(help="Text to calibrate on.")],
    text: Annotated[list[Path], typer.Option(help="Text to evaluate on.")],
    length: Annotated[str, typer.Option(help="Length of a window in tokens.")] = "64k",
    train_length: Annotated[
        str | None,
        typer.Option(
            help="Length that the model was trained on.",
            show_default="length.max of the checkpoint's train.yaml",
        ),
    ] = None,
    target: Annotated[str, typer.Option(help="Length to calibrate for.")] = "8k",
    output: Output = Path("results/state_collapse"),
) -> None:
    """Evaluate the loss by position on held-out books, without and with every mitigation."""
    model, tokenizer = load_recurrent(checkpoint), load_tokenizer(checkpoint)
    trained, tokens = required_training_length(checkpoint, train_length), parse_length(length)
    if tokens <= trained:
        raise UserError(
            f"states collapse beyond {format_length(trained)} tokens: give a longer --length"
        )
    documents = read_documents(text, tokenizer, model)
    calibrated = calibrate_all(
        model, read_documents(calibration, tokenizer, model), trained, parse_length(target), output
    )
    columns = sorted({trained, *(4**k * 1024 for k in range(6) if 4**k * 1024 <= tokens)})
    print("| mitigation | " + " | ".join(f"≤ {format_length(c)}" for c in columns), end=" | ")
    print("forgets robustly |\n" + "| --- " * (len(columns) + 2) + "|")
    for name, spec in {**uncalibrated(trained), **calibrated}.items():
        rows = loss.evaluate(
            Mitigated(model, mitigation(spec)),
            documents,
            length=tokens,
            output=output / "books" / format_length(tokens) / f"{name}.jsonl",
        )
        buckets = loss.summarise(rows)[1]
        cells = [f"{next(b for b in buckets if b.stop >= c).nats.mean:.3f}" for c in columns]
        found = forgetting(rows, trained)
        assert found is not None  # the windows are longer than the training length
        verdict = f"{'yes' if found.robust else 'no'} ({found.beyond / found.inside:.2f} ×)"
        print(f"| {name} | {' | '.join(cells)} | {verdict} |", flush=True)


@app.command()
def passkey(
    checkpoint: str,
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = "256,4k,16k,64k,256k",
    n: Annotated[
        int, typer.Option("--n", help="Prompts for each length and each of five depths.")
    ] = 4,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(help="Text to calibrate on.", show_default="the filler, without keys"),
    ] = None,
    filler: Annotated[
        Path | None,
        typer.Option(help="Text to hide the keys in.", show_default="The grass is green. …"),
    ] = None,
    train_length: Annotated[str, typer.Option(help="Training length.")] = "256",
    target: Annotated[str, typer.Option(help="Length to calibrate for.")] = "16k",
    output: Output = Path("results/state_collapse"),
) -> None:
    """Evaluate passkey recall by length, without and with every mitigation.

    A variant that recalls less than one in five keys at a length is not evaluated at longer ones.
    """
    model, tokenizer = load_recurrent(checkpoint), load_tokenizer(checkpoint)
    trained, tokens = parse_length(train_length), parse_length(target)
    columns = parse_lengths(lengths)
    what = [Path(checkpoint).resolve().name, *([filler.stem] if filler else [])]
    folder = output / "-".join(["passkey", *what])
    if calibration is None:
        calibration = [folder / "filler.txt"]
        # At least two windows of the target length.
        write_atomic(calibration[0], FILLER * max(400, 2 * tokens // len(FILLER) + 1))
    documents = read_documents(calibration, tokenizer, model)
    calibrated = calibrate_all(model, documents, trained, tokens, folder)
    print("| mitigation | " + " | ".join(format_length(c) for c in columns) + " |")
    print("| --- " * (len(columns) + 1) + "|")
    variants = [
        (name, spec, None) for name, spec in {**uncalibrated(trained), **calibrated}.items()
    ]
    for name, spec, chunk in [*variants, ("chunk_select-4x", "none", 4 * trained)]:
        opened = OpenCheckpoint(name, Mitigated(model, mitigation(spec)), tokenizer)
        cells: list[str] = []
        for length in columns:
            rows = recall.evaluate(
                [opened],
                Grid([length], n, recall.evenly_spaced(5), filler=filler),
                output=folder / f"{name}.jsonl",
                chunk=chunk,
            )
            share = recall.summarise(rows)[length, None]
            cells.append(f"{share} ({share.n})")
            if share.mean < 0.2:
                break
        cells += ["–"] * (len(columns) - len(cells))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def uncalibrated(trained: int) -> dict[str, str]:
    """Returns the mitigations that need no calibration, by name."""
    return {
        "none": "none",
        "forget_more-1.0": "forget_more(decay_scale=0.9999, input_scale=1.0)",
        "forget_more-0.75": "forget_more(decay_scale=0.9999, input_scale=0.75)",
        "forget_more-train": f"forget_more(decay_scale={1 - 1 / trained}, input_scale=1.0)",
        "sliding_window-1x": f"sliding_window(window={trained})",
        "sliding_window-4x": f"sliding_window(window={4 * trained})",
    }


def calibrate_all(
    model: RecurrentLM, documents: list[Document], trained: int, target: int, folder: Path
) -> dict[str, Path]:
    """Calibrates every method that needs it and returns the files; existing files are kept.

    Raises:
        UserError: existing files are from other texts or for other lengths.
    """
    settings = Settings(trained, target, windows=16)
    hashes = tuple(document.sha256 for document in documents)
    about = {"train_length": trained, "target_length": target, "text_sha256": list(hashes)}
    about_path = folder / "calibrated" / "about.json"
    if about_path.is_file() and json.loads(about_path.read_text()) != about:
        raise UserError(
            f"{about_path.parent} was made with other texts or lengths: choose another --output"
        )
    write_atomic(about_path, json.dumps(about) + "\n")
    variants = {name: (name, settings) for name in METHODS}
    # A search processes windows of the target length many times, so it gets fewer of them.
    for name in ("scale_delta", "scale_decay", "power_decay"):
        variants[name] = name, Settings(trained, target, windows=4, steps=20)
    variants["scale_delta-selective"] = (
        "scale_delta",
        Settings(trained, target, windows=16, share=0.2),
    )
    variants["state_norm-0.7"] = "state_norm", Settings(trained, margin=0.7, windows=16)
    files = {}
    for name, (method, chosen) in variants.items():
        path = folder / "calibrated" / f"{name}.yaml"
        if not path.is_file():
            try:
                member = calibrate(model, documents, method, chosen)
            except UserError as error:
                print(f"{name}: {error}")
                continue
            record = Calibration(str(path), model.fingerprint(), trained, hashes)
            write_calibration(path, [member], record)
        files[name] = path
    return files


if __name__ == "__main__":
    run_script(app, __doc__)
