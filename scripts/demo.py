"""The demo: passkeys far beyond the training length, with a broken model, repaired, and a good one.

    python scripts/demo.py
    python scripts/demo.py --lengths 256,4k,64k --n 5 --output demo

Writes the answers and a picture of them. A demo that was stopped goes on with the same command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn import Mitigated, load_tokenizer, mitigation
from longrnn.cli.tables import print_passkey
from longrnn.diagnostics.plots import passkey_heat_map
from longrnn.evaluation.calibrate import Settings, calibrate
from longrnn.evaluation.passkey import by_model, evaluate, evenly_spaced, summarise
from longrnn.evaluation.passkey_grid import Grid
from longrnn.evaluation.texts import read_documents
from longrnn.files import write_atomic
from longrnn.hf.loading import load_recurrent
from longrnn.hf.opened import OpenCheckpoint, open_checkpoint
from longrnn.programs import run_script
from longrnn.tasks.passkey_prompts import FILLER
from longrnn.units import format_length, parse_lengths

BROKEN, HOLDING = "passkey-tiny-short", "passkey-tiny"
REPAIRED = f"{BROKEN} + token_filter"
TRAINED = 256


def demo(
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = "256,1k,4k,16k,64k",
    n: Annotated[int, typer.Option("--n", help="Prompts per cell.")] = 10,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("demo"),
) -> None:
    """Evaluates one broken checkpoint as it is and repaired, and one that holds."""
    asked = parse_lengths(lengths)
    first, last = asked[0], asked[-1]
    broken, tokenizer = load_recurrent(BROKEN), load_tokenizer(BROKEN)

    # The filler alone, without a key, says which heads remember and which tokens they ignore.
    write_atomic(output / "filler.txt", FILLER * 400)
    documents = read_documents([output / "filler.txt"], tokenizer, broken)
    settings = Settings(train_length=TRAINED, target_length=max(last, 2 * TRAINED))
    found = calibrate(broken, documents, "token_filter", settings, quiet=True)
    heads = [
        (layer, head)
        for layer, thresholds in enumerate(found["threshold"])
        for head, threshold in enumerate(thresholds)
        if threshold is not None
    ]
    rows = evaluate(
        [
            OpenCheckpoint(BROKEN, broken, tokenizer),
            OpenCheckpoint(REPAIRED, Mitigated(broken, mitigation(found)), tokenizer),
            open_checkpoint(HOLDING),
        ],
        Grid(asked, n, evenly_spaced(5)),
        output=output / "results.jsonl",
    )
    passkey_heat_map(rows, output / "heatmap.png")
    cells = {}
    for name, one in by_model(rows).items():
        print_passkey(name, one)
        cells[name] = summarise(one)

    def says(name: str, length: int) -> str:
        return f"{cells[name][length, None].mean:.0%} of the keys at {format_length(length)} tokens"

    where = ", ".join(f"head {head} of layer {layer}" for layer, head in heads)
    typer.echo(
        f"{output / 'results.jsonl'}\n{output / 'heatmap.png'}\n"
        f"{BROKEN}, trained on prompts of {TRAINED} tokens, recalls {says(BROKEN, first)} and "
        f"{says(BROKEN, last)}; with the filler's tokens kept out of the one kind of head that "
        f"remembers ({where}), and no training, it recalls {says(REPAIRED, last)}.\n"
        f"{HOLDING}, the same network trained on segments that count thousands of times, "
        f"recalls {says(HOLDING, first)} and {says(HOLDING, last)}."
    )


if __name__ == "__main__":
    run_script(demo, __doc__)
