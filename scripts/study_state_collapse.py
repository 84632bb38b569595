"""What helps against state collapse: every mitigation, on books and on passkeys.

    longrnn train configs/train/books_collapse.yaml
    python scripts/study_state_collapse.py books runs/books-collapse \\
        --calibration data/war_and_peace.txt --text data/moby_dick.txt --text data/tom_sawyer.txt
    python scripts/study_state_collapse.py passkey passkey-tiny-short --lengths 256,4k,64k,256k,1M

Both parts calibrate first, on text that is not measured, then measure, resumably, and print a
table in Markdown. Results go to `--output`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn import Mitigated, load, load_tokenizer, mitigation
from longrnn.cli.options import training_length
from longrnn.errors import UserError
from longrnn.evaluation import passkey as recall
from longrnn.evaluation import perplexity as loss
from longrnn.evaluation.calibrate import METHODS, Settings, calibrate
from longrnn.evaluation.texts import read_documents
from longrnn.mitigations.base import Calibration
from longrnn.mitigations.spec import write_calibration
from longrnn.models import RecurrentLM
from longrnn.tasks.passkey import FILLER
from longrnn.text import Tokenizer
from longrnn.units import format_length, parse_length, parse_lengths

app = typer.Typer(help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)

Output = Annotated[Path, typer.Option(help="Folder of the results.")]


@app.command()
def books(
    checkpoint: str,
    calibration: Annotated[list[Path], typer.Option(help="Text to calibrate on.")],
    text: Annotated[list[Path], typer.Option(help="Text to measure on.")],
    length: Annotated[str, typer.Option(help="Tokens of a window.")] = "64k",
    target: Annotated[str, typer.Option(help="Length to calibrate for.")] = "8k",
    output: Output = Path("results/state_collapse"),
) -> None:
    """Loss by position on held-out books, plain and under every mitigation."""
    model, tokenizer = load(checkpoint), load_tokenizer(checkpoint)
    trained = training_length(checkpoint, None) or 0
    known = calibrated(model, tokenizer, calibration, trained, parse_length(target), output)
    documents = read_documents(text, tokenizer, model)
    columns = [trained, *(4**k * 1024 for k in range(6) if 4**k * 1024 <= parse_length(length))]
    print("| mitigation | " + " | ".join(f"≤ {format_length(c)}" for c in columns), end=" | ")
    print("forgets robustly |\n" + "| --- " * (len(columns) + 2) + "|")
    for name, spec in {**uncalibrated(trained), **known}.items():
        rows = loss.evaluate(
            Mitigated(model, mitigation(spec)),
            documents,
            length=parse_length(length),
            output=output / "books" / format_length(parse_length(length)) / f"{name}.jsonl",
        )
        buckets = loss.summarise(rows)[1]
        cells = [f"{next(b for b in buckets if b.stop >= c).nats.mean:.3f}" for c in columns]
        judged = loss.forgetting(rows, trained)
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
    model, tokenizer = load(checkpoint), load_tokenizer(checkpoint)
    folder = output / "-".join(["passkey", checkpoint, *([filler.stem] if filler else [])])
    if calibration is None:
        folder.mkdir(parents=True, exist_ok=True)
        calibration = [folder / "filler.txt"]
        calibration[0].write_text(FILLER * 400)
    trained = parse_length(train_length)
    known = calibrated(model, tokenizer, calibration, trained, parse_length(target), folder)
    columns = parse_lengths(lengths)
    print("| mitigation | " + " | ".join(format_length(c) for c in columns) + " |")
    print("| --- " * (len(columns) + 1) + "|")
    for name, spec in {**uncalibrated(trained), **known}.items():
        subject = recall.Subject(name, Mitigated(model, mitigation(spec)), tokenizer)
        cells: list[str] = []
        for length in columns:
            rows = recall.evaluate(
                [subject],
                lengths=[length],
                depths=recall.evenly_spaced(5),
                n=n,
                output=folder / f"{name}.jsonl",
                filler=filler,
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
    model: RecurrentLM,
    tokenizer: Tokenizer,
    texts: list[Path],
    trained: int,
    target: int,
    folder: Path,
) -> dict[str, Path]:
    """Files of every method that can be calibrated; those that were made before are kept."""
    documents = read_documents(texts, tokenizer, model)
    settings = Settings(trained, target, windows=16)
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
            hashes = tuple(document.sha256 for document in documents)
            known = Calibration(str(path), model.fingerprint(), trained, hashes)
            write_calibration(path, [member], known)
        files[name] = path
    return files


if __name__ == "__main__":
    app()
