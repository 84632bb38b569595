"""`longrnn convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.command import Argument
from longrnn.options import Options


class Conversion(Options):
    """What is written in which layout."""

    source: Annotated[str, Argument("SOURCE")]
    """A Mamba-2 checkpoint: a name, or a folder in any of the layouts."""
    destination: Annotated[Path, Argument("DESTINATION")]
    """A new folder; the tokenizer is copied too."""
    to: str
    """Layout to write: ours, native (mamba-ssm, state-spaces/mamba2-*) or hf (Mamba2ForCausalLM of
    transformers)."""


def convert(conversion: Conversion) -> None:
    """Write a Mamba-2 checkpoint in another layout; the weights stay bit for bit the same.

    An adapter (LoRA) is merged into its base model.

    Example: longrnn convert passkey-tiny passkey-tiny-hf --to hf
    """
    from longrnn.hf.convert import convert as write

    write(conversion.source, conversion.destination, to=conversion.to)
    typer.echo(str(conversion.destination))
