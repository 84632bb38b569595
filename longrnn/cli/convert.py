"""`longrnn convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A Mamba-2 checkpoint: a name, or a folder of any layout.", show_default=False
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(help="A new folder; its tokenizer goes along.", show_default=False)
    ],
    to: Annotated[
        str,
        typer.Option(
            help="ours, native (mamba-ssm, state-spaces/mamba2-*) or hf (transformers' "
            "Mamba2ForCausalLM).",
            show_default=False,
        ),
    ],
) -> None:
    """Write a Mamba-2 checkpoint in another layout, bit for bit.

    Example: longrnn convert passkey-tiny passkey-tiny-hf --to hf
    """
    from longrnn.hf.convert import convert as write

    write(source, destination, to=to)
    typer.echo(str(destination))
