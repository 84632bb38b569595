"""Compare all mitigations of state collapse: the loss on books, a long stream, and passkeys.

    python scripts/study_state_collapse.py books collapse-tiny --calibration data/don_quixote.txt \\
        --choice data/karamazov_brothers.txt --text data/moby_dick.txt --text data/tom_sawyer.txt
    python scripts/study_state_collapse.py stream collapse-tiny --text data/moby_dick.txt \\
        --calibration data/don_quixote.txt --variant none --variant sliding_window-1x
    python scripts/study_state_collapse.py passkey passkey-tiny-short --lengths 256,64k
    python scripts/study_state_collapse.py axes --passkey passkey-tiny-short

`books` evaluates every registered mitigation at several settings, and chooses the best setting of
each on a text that is used for nothing else. `stream` reads one long text without a break.
`passkey` asks for keys. `axes` prints the loss and the keys side by side. Mitigations are
calibrated on text that is not evaluated. Results are written to `--output`; the same command
resumes an interrupted study.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from longrnn import Mitigated, load_tokenizer, mitigation
from longrnn.data.prompts import FILLER
from longrnn.errors import UserError
from longrnn.evaluation import passkey as recall
from longrnn.evaluation import perplexity as loss
from longrnn.evaluation.passkey_grid import Grid
from longrnn.evaluation.texts import read_documents, tokenised
from longrnn.files import write_atomic
from longrnn.hf.loading import load_recurrent
from longrnn.hf.opened import OpenCheckpoint
from longrnn.hf.training_length import required_training_length
from longrnn.mitigations import MITIGATIONS
from longrnn.models import RecurrentLM
from longrnn.programs import new_app, run_script
from longrnn.studies.collapse import (
    Calibrator,
    Variant,
    best,
    keyed_prompts,
    refuse_shared,
    select,
    variants,
)
from longrnn.studies.collapse_tables import (
    axes_table,
    books_table,
    rows_by_variant,
    stream_table,
)
from longrnn.studies.long_stream import read_stream
from longrnn.studies.loss_inside import beginnings, evaluate
from longrnn.text import read_text
from longrnn.units import format_length, parse_length, parse_lengths

app = new_app()

# A variant that recalls fewer keys than this share is not evaluated at longer lengths.
FEW = 0.2
# Passkey prompts on which `state_norm` is calibrated, so that its thresholds allow for a key.
KEYED = 64
PLAIN = Variant("none", "none", {})

Output = Annotated[Path, typer.Option(help="Folder for the results.")]
TrainLength = Annotated[
    str | None,
    typer.Option(
        help="Length that the model was trained on.",
        show_default="length.max of the checkpoint's train.yaml",
    ),
]
Target = Annotated[str, typer.Option(help="Length to calibrate for.")]
Texts = Annotated[list[Path], typer.Option(help="Text to evaluate on.")]
CalibrationTexts = Annotated[list[Path], typer.Option(help="Text to calibrate on.")]
Names = Annotated[
    list[str] | None,
    typer.Option("--variant", help="Variants to evaluate.", show_default="all"),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
RESULTS = Path("results/state_collapse")


@app.command()
def books(
    checkpoint: str,
    calibration: CalibrationTexts,
    choice: Annotated[list[Path], typer.Option(help="Text to choose settings on.")],
    text: Texts,
    length: Annotated[str, typer.Option(help="Length of a window in tokens.")] = "64k",
    windows: Annotated[int, typer.Option(help="Windows of that length from each text.")] = 4,
    choice_windows: Annotated[int, typer.Option(help="The same, for choosing.")] = 1,
    train_length: TrainLength = None,
    target: Target = "8k",
    variant: Names = None,
    every_setting: Annotated[
        list[str] | None,
        typer.Option(
            help="Mitigation to evaluate at every setting; of the others, only the chosen one.",
            show_default="all",
        ),
    ] = None,
    output: Output = RESULTS,
    quiet: Quiet = False,
) -> None:
    """Evaluate the loss by position on held-out books, without and with every mitigation.

    Example: python scripts/study_state_collapse.py books collapse-tiny --calibration a.txt
    --choice b.txt --text c.txt --text d.txt
    """
    model, tokenizer = load_recurrent(checkpoint), load_tokenizer(checkpoint)
    trained, tokens = required_training_length(checkpoint, train_length), parse_length(length)
    if tokens <= trained:
        raise UserError(
            f"states collapse beyond {format_length(trained)} tokens: give a longer --length"
        )
    if min(windows, choice_windows) < 1:
        raise UserError("windows and choice-windows must be at least 1: give larger numbers")
    # The plain model comes first, because the others are compared with it.
    wanted = {"none": PLAIN} | select(variants(model, trained, parse_length(target)), variant or [])
    for_choice = beginnings(read_documents(choice, tokenizer, model), choice_windows * tokens)
    held_out = beginnings(read_documents(text, tokenizer, model), windows * tokens)
    given = read_documents(calibration, tokenizer, model)
    refuse_shared(given, for_choice, held_out)
    folder = output / "books" / format_length(tokens)
    how = {"trained": trained, "target": parse_length(target), "quiet": quiet}
    calibrator = Calibrator(model, given, output / "calibrated", **how)
    models = {name: built(model, calibrator, one) for name, one in wanted.items()}
    mitigated = {name: one for name, one in models.items() if one is not None}
    on_choice = {
        name: loss.evaluate(
            one, for_choice, length=tokens, output=folder / f"choice/{name}.jsonl", quiet=quiet
        )
        for name, one in mitigated.items()
    }
    chosen = best(on_choice, wanted)
    write_atomic(folder / "chosen.json", json.dumps(chosen) + "\n")
    whole = [MITIGATIONS[name].name for name in every_setting or MITIGATIONS]
    found = {
        name: evaluate(
            one,
            held_out,
            train_length=trained,
            length=tokens,
            output=folder / f"{name}.jsonl",
            quiet=quiet,
        )
        for name, one in mitigated.items()
        if wanted[name].method in whole or name in chosen.values()
    }
    columns = [stop for stop in (2**k for k in range(6, 40, 2)) if trained < stop < tokens]
    publish(
        books_table(found, on_choice, trained, [*columns, tokens], set(chosen.values())), folder
    )


@app.command()
def stream(
    checkpoint: str,
    calibration: CalibrationTexts,
    text: Texts,
    length: Annotated[str, typer.Option(help="Length of the stream in tokens.")] = "1M",
    block: Annotated[str, typer.Option(help="Tokens of a block that is read afresh.")] = "64k",
    train_length: TrainLength = None,
    target: Target = "8k",
    variant: Names = None,
    output: Output = RESULTS,
    quiet: Quiet = False,
) -> None:
    """Evaluate the loss on one stream: the texts joined in the order in which they are given.

    Example: python scripts/study_state_collapse.py stream collapse-tiny --calibration a.txt
    --text c.txt --variant none --variant state_norm-1x
    """
    model, tokenizer = load_recurrent(checkpoint), load_tokenizer(checkpoint)
    trained = required_training_length(checkpoint, train_length)
    wanted = select(variants(model, trained, parse_length(target)), variant or [])
    whole = "".join(read_text(path)[0] for path in text)
    digest = hashlib.sha256(whole.encode()).hexdigest()
    document = tokenised("+".join(path.name for path in text), digest, whole, tokenizer)
    given = read_documents(calibration, tokenizer, model)
    refuse_shared(given, read_documents(text, tokenizer, model))
    how = {"trained": trained, "target": parse_length(target), "quiet": quiet}
    calibrator = Calibrator(model, given, output / "calibrated", **how)
    stem = "+".join(path.stem for path in text)
    folder = output / "stream" / f"{stem}-{format_length(parse_length(length))}"
    found = {}
    for name, one in wanted.items():
        mitigated = built(model, calibrator, one)
        if mitigated is not None:
            found[name] = read_stream(
                mitigated,
                document,
                length=parse_length(length),
                block=parse_length(block),
                output=folder / f"{name}.jsonl",
                quiet=quiet,
            )
    publish(stream_table(found), folder)


@app.command()
def passkey(
    checkpoint: str,
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = "256,4k,16k,64k,256k",
    n: Annotated[
        int, typer.Option("--n", help="Prompts for each length and each of five depths.")
    ] = 10,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(help="Text to calibrate on.", show_default="the filler, without keys"),
    ] = None,
    filler: Annotated[
        Path | None,
        typer.Option(help="Text to hide the keys in.", show_default="The grass is green. …"),
    ] = None,
    train_length: Annotated[str, typer.Option(help="Training length.")] = "256",
    target: Target = "16k",
    variant: Names = None,
    batch_size: Annotated[int, typer.Option(help="Prompts in one batch.")] = 16,
    output: Output = RESULTS,
    quiet: Quiet = False,
) -> None:
    """Evaluate passkey recall by length, without and with every mitigation.

    `state_norm-keyed` is calibrated on prompts with keys of training, and the others on text
    without keys. `chunk_select-4x` answers from one of the chunks of four times the training
    length. A variant that recalls less than one in five keys at a length is not evaluated at longer
    ones.

    Example: python scripts/study_state_collapse.py passkey passkey-tiny --lengths 256,64k
    """
    model, tokenizer = load_recurrent(checkpoint), load_tokenizer(checkpoint)
    trained, tokens = parse_length(train_length), parse_length(target)
    columns = parse_lengths(lengths)
    folder = passkey_folder(output, checkpoint, filler)
    if calibration is None:
        calibration = [folder / "filler.txt"]
        # At least two windows of the target length.
        write_atomic(calibration[0], FILLER * max(400, 2 * tokens // len(FILLER) + 1))
    settings = variants(model, trained, tokens)
    keyed = Variant("state_norm-keyed", "state_norm", settings["state_norm-1x"].setting)
    by_chunk = Variant("chunk_select-4x", "none", {})
    wanted = select({**settings, keyed.name: keyed, by_chunk.name: by_chunk}, variant or [])
    given = read_documents(calibration, tokenizer, model)
    how = {"trained": trained, "target": tokens, "quiet": quiet}
    plain = Calibrator(model, given, folder / "calibrated", **how)
    calibrators = dict.fromkeys(wanted, plain)
    if keyed.name in wanted:
        prompts = [keyed_prompts(tokenizer, trained, KEYED)]
        calibrators[keyed.name] = Calibrator(model, prompts, folder / "calibrated-keyed", **how)
    lines = [
        "| mitigation | " + " | ".join(format_length(c) for c in columns) + " |",
        "| --- " * (len(columns) + 1) + "|",
    ]
    for name, one in wanted.items():
        mitigated = built(model, calibrators[name], one)
        if mitigated is None:
            continue
        cells: list[str] = []
        for length in columns:
            rows = recall.evaluate(
                [OpenCheckpoint(name, mitigated, tokenizer)],
                Grid([length], n, recall.evenly_spaced(5), filler=filler),
                output=folder / f"{name}.jsonl",
                chunk=4 * trained if one is by_chunk else None,
                batch_size=batch_size,
                quiet=quiet,
            )
            share = recall.summarise(rows)[length, None]
            cells.append(f"{share} ({share.n})")
            if share.mean < FEW:
                break
        cells += ["–"] * (len(columns) - len(cells))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    publish(lines, folder)


@app.command()
def axes(
    passkey: Annotated[list[str], typer.Option(help="Checkpoint whose keys to show.")],
    length: Annotated[str, typer.Option(help="Length of the windows of books.")] = "64k",
    output: Output = RESULTS,
) -> None:
    """Print the loss of `books` and the keys of `passkey` side by side.

    Example: python scripts/study_state_collapse.py axes --passkey passkey-tiny-short
    """
    losses = rows_by_variant(output / "books" / length)
    keys = {
        Path(name).name: rows_by_variant(passkey_folder(output, name, None)) for name in passkey
    }
    publish(axes_table(losses, keys), output)


def built(model: RecurrentLM, calibrator: Calibrator, variant: Variant) -> Mitigated | None:
    """Returns the mitigated model; None, with the reason printed, where it cannot be calibrated."""
    try:
        return Mitigated(model, mitigation(calibrator.spec(variant)))
    except UserError as error:
        typer.echo(f"{variant.name}: {error}", err=True)
        return None


def passkey_folder(output: Path, checkpoint: str, filler: Path | None) -> Path:
    """Returns the folder of the passkey results of a checkpoint."""
    what = [Path(checkpoint).resolve().name, *([filler.stem] if filler else [])]
    return output / "-".join(["passkey", *what])


def publish(lines: Sequence[str], folder: Path) -> None:
    """Prints a table and writes it to `table.md`."""
    write_atomic(folder / "table.md", "\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    run_script(app, __doc__)
