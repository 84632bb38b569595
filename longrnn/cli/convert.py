"""`longrnn convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A Mamba-2 checkpoint: a name, or a folder in any of the layouts.",
            show_default=False,
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(help="A new folder; the tokenizer is copied too.", show_default=False)
    ],
    to: Annotated[
        str,
        typer.Option(
            help="Layout to write: ours, native (mamba-ssm, state-spaces/mamba2-*) or hf "
            "(Mamba2ForCausalLM of transformers).",
            show_default=False,
        ),
    ],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge an adapter (LoRA) into its base model first.")
    ] = False,
) -> None:
    """Write a Mamba-2 checkpoint in another layout; the weights stay bit for bit the same.

    Example: longrnn convert passkey-tiny passkey-tiny-hf --to hf
    """
    from longrnn.hf.convert import convert as write

    write(source, destination, to=to, merge=merge)
    typer.echo(str(destination))
