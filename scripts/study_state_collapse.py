"""What helps against state collapse: every mitigation, on books and on passkeys.

    longrnn train configs/train/books_collapse.yaml
    python scripts/study_state_collapse.py books runs/books-collapse \\
        --calibration data/war_and_peace.txt --text data/moby_dick.txt --text data/tom_sawyer.txt
    python scripts/study_state_collapse.py passkey passkey-tiny-short --lengths 256,4k,64k,256k,1M

Both parts calibrate first, on text that is not measured, then measure, resumably, and print a
table in Markdown. Results go to `--output`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from longrnn import Mitigated, load_tokenizer, mitigation
from longrnn.cli.options import TrainLength, training_length
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
from longrnn.mitigations.base import Calibration
from longrnn.mitigations.spec import write_calibration
from longrnn.models import RecurrentLM
from longrnn.programs import new_app, run_script
from longrnn.tasks.passkey import FILLER
from longrnn.units import format_length, parse_length, parse_lengths

app = new_app()

Output = Annotated[Path, typer.Option(help="Folder of the results.")]


@app.command()
def books(
    checkpoint: str,
    calibration: Annotated[list[Path], typer.Option(help="Text to calibrate on.")],
    text: Annotated[list[Path], typer.Option(help="Text to measure on.")],
    length: Annotated[str, typer.Option(help="Tokens of a window.")] = "64k",
    train_length: TrainLength = None,
    target: Annotated[str, typer.Option(help="Length to calibrate for.")] = "8k",
    output: Output = Path("results/state_collapse"),
) -> None:
    """Loss by position on held-out books, plain and under every mitigation."""
    model, tokenizer = load_recurrent(checkpoint), load_tokenizer(checkpoint)
    trained, tokens = training_length(checkpoint, train_length), parse_length(length)
    if trained is None:
        raise UserError(f"{checkpoint} does not say its training length: give --train-length")
    if tokens <= trained:
        raise UserError(f"collapse shows beyond {format_length(trained)}: give a longer --length")
    documents = read_documents(text, tokenizer, model)
    known = calibrated(
        model, read_documents(calibration, tokenizer, model), trained, parse_length(target), output
    )
    columns = sorted({trained, *(4**k * 1024 for k in range(6) if 4**k * 1024 <= tokens)})
    print("| mitigation | " + " | ".join(f"≤ {format_length(c)}" for c in columns), end=" | ")
    print("forgets robustly |\n" + "| --- " * (len(columns) + 2) + "|")
    for name, spec in {**uncalibrated(trained), **known}.items():
        rows = loss.evaluate(
            Mitigated(model, mitigation(spec)),
            documents,
            length=tokens,
            output=output / "books" / format_length(tokens) / f"{name}.jsonl",
        )
        buckets = loss.summarise(rows)[1]
        cells = [f"{next(b for b in buckets if b.stop >= c).nats.mean:.3f}" for c in columns]
        judged = forgetting(rows, trained)
        assert judged is not None
        verdict = f"{'yes' if judged.robust else 'no'} ({judged.beyond / judged.inside:.2f} ×)"
        print(f"| {name} | {' | '.join(cells)} | {verdict} |", flush=True)


@app.command()
def passkey(
    checkpoint: str,
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = "256,4k,16k,64k,256k",
    n: Annotated[int, typer.Option("--n", help="Prompts per depth (of five).")] = 4,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(help="Text to calibrate on.", show_default="the filler, without keys"),
    ] = None,
    filler: Annotated[
        Path | None, typer.Option(help="Text to hide keys in.", show_default="the usual one")
    ] = None,
    train_length: Annotated[str, typer.Option(help="To calibrate at.")] = "256",
    target: Annotated[str, typer.Option(help="Length to calibrate for.")] = "16k",
    output: Output = Path("results/state_collapse"),
) -> None:
    """Passkeys recalled by length, plain and under every mitigation.

    A variant that recalls less than one in five at a length is not asked at longer ones.
    """
    model, tokenizer = load_recurrent(checkpoint), load_tokenizer(checkpoint)
    trained, tokens = parse_length(train_length), parse_length(target)
    columns = parse_lengths(lengths)
    what = [Path(checkpoint).resolve().name, *([filler.stem] if filler else [])]
    folder = output / "-".join(["passkey", *what])
    if calibration is None:
        calibration = [folder / "filler.txt"]
        # Two windows of the target length, at least.
        write_atomic(calibration[0], FILLER * max(400, 2 * tokens // len(FILLER) + 1))
    documents = read_documents(calibration, tokenizer, model)
    known = calibrated(model, documents, trained, tokens, folder)
    print("| mitigation | " + " | ".join(format_length(c) for c in columns) + " |")
    print("| --- " * (len(columns) + 1) + "|")
    variants = [(name, spec, None) for name, spec in {**uncalibrated(trained), **known}.items()]
    for name, spec, chunk in [*variants, ("chunk_select-4x", "none", 4 * trained)]:
        subject = OpenCheckpoint(name, Mitigated(model, mitigation(spec)), tokenizer)
        cells: list[str] = []
        for length in columns:
            rows = recall.evaluate(
                [subject],
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
    """Settings that need no text: none, the published pairs, windows of the training length."""
    return {
        "none": "none",
        "forget_more-1.0": "forget_more(decay_scale=0.9999, input_scale=1.0)",
        "forget_more-0.75": "forget_more(decay_scale=0.9999, input_scale=0.75)",
        "forget_more-train": f"forget_more(decay_scale={1 - 1 / trained}, input_scale=1.0)",
        "sliding_window-1x": f"sliding_window(window={trained})",
        "sliding_window-4x": f"sliding_window(window={4 * trained})",
    }


def calibrated(
    model: RecurrentLM, documents: list[Document], trained: int, target: int, folder: Path
) -> dict[str, Path]:
    """Files of every method that can be calibrated; those that were made before are kept.

    Raises:
        UserError: those were made of other texts, or for other lengths.
    """
    settings = Settings(trained, target, windows=16)
    hashes = tuple(document.sha256 for document in documents)
    about = {"train_length": trained, "target_length": target, "text_sha256": list(hashes)}
    record = folder / "calibrated" / "about.json"
    if record.is_file() and json.loads(record.read_text()) != about:
        raise UserError(
            f"{record.parent} was made with other texts or lengths: choose another --output"
        )
    write_atomic(record, json.dumps(about) + "\n")
    ways = {name: (name, settings) for name in METHODS}
    # A search runs windows of the target length again and again: fewer of them.
    for name in ("scale_delta", "scale_decay", "power_decay"):
        ways[name] = name, Settings(trained, target, windows=4, steps=20)
    ways["scale_delta-selective"] = "scale_delta", Settings(trained, target, windows=16, share=0.2)
    ways["state_norm-0.7"] = "state_norm", Settings(trained, margin=0.7, windows=16)
    files = {}
    for name, (method, asked) in ways.items():
        path = folder / "calibrated" / f"{name}.yaml"
        if not path.is_file():
            try:
                member = calibrate(model, documents, method, asked)
            except UserError as error:
                print(f"{name}: {error}")
                continue
            known = Calibration(str(path), model.fingerprint(), trained, hashes)
            write_calibration(path, [member], known)
        files[name] = path
    return files


if __name__ == "__main__":
    run_script(app, __doc__)
