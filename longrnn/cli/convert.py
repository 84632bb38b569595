"""`longrnn convert`."""

from __future__ import annotations

from pathlib import Path

import typer
from pydantic import Field

from longrnn.options import Options


class Conversion(Options):
    """What is written in which layout."""

    source: str = Field(
        description="A Mamba-2 checkpoint: a name, or a folder in any of the layouts."
    )
    destination: Path = Field(description="A new folder; the tokenizer is copied too.")
    to: str = Field(
        description="Layout to write: ours, native (mamba-ssm, state-spaces/mamba2-*) or hf "
        "(Mamba2ForCausalLM of transformers)."
    )
    merge: bool = Field(False, description="Merge an adapter (LoRA) into its base model first.")


def convert(conversion: Conversion) -> None:
    """Write a Mamba-2 checkpoint in another layout; the weights stay bit for bit the same.

    Example: longrnn convert passkey-tiny passkey-tiny-hf --to hf
    """
    from longrnn.hf.convert import convert as write

    write(conversion.source, conversion.destination, to=conversion.to, merge=conversion.merge)
    typer.echo(str(conversion.destination))
