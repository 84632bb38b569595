"""The demo: two embedded checkpoints of one size on passkeys far beyond their training length.

Usage: python scripts/demo.py [--lengths 256,1k,4k,16k,64k] [--n 10] [--output demo]
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.evaluate import passkey
from longrnn.evaluation.passkey import by_model, summarise
from longrnn.evaluation.results import read_results
from longrnn.units import format_length, parse_lengths

BROKEN, HOLDING = "passkey-tiny-short", "passkey-tiny"


def demo(
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = "256,1k,4k,16k,64k",
    n: Annotated[int, typer.Option("--n", help="Prompts per cell.")] = 10,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("demo"),
) -> None:
    """Evaluates both checkpoints, then says what was seen."""
    passkey([BROKEN, HOLDING], lengths=lengths, n=n, output=output)
    _, rows = read_results(output / "results.jsonl")
    cells = {name: summarise(one) for name, one in by_model(rows).items()}
    asked = parse_lengths(lengths)
    first, last = asked[0], asked[-1]

    def says(name: str, length: int) -> str:
        return f"{cells[name][length, None].mean:.0%} of the keys at {format_length(length)} tokens"

    typer.echo(
        f"{BROKEN}, trained on prompts of 256 tokens, recalls {says(BROKEN, first)} and "
        f"{says(BROKEN, last)}.\n"
        f"{HOLDING}, the same network trained with a state that is carried over long documents, "
        f"recalls {says(HOLDING, first)} and {says(HOLDING, last)}."
    )


if __name__ == "__main__":
    typer.run(demo)
