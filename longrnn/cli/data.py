"""`longrnn data build`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import field_validator

from longrnn.cli.command import Argument
from longrnn.cli.options import Quiet
from longrnn.text import Reading


class Corpora(Reading, Quiet):
    """Documents, and how they become a corpus."""

    data: Annotated[list[str], Argument("DATA")]
    """UTF-8 text files, tables (.jsonl, .json, .csv, .parquet), folders of them, or names
    of datasets on the Hugging Face Hub."""
    out: Path
    """Folder to write."""
    tokenizer: str = "bytes"
    """Tokenizer: bytes, a checkpoint, a tokenizer.json, or a folder with one."""

    @field_validator("split_on")
    @classmethod
    def _without_escapes(cls, text: str | None) -> str | None:
        """Line ends and tabs in the place of `\\n`, `\\r` and `\\t`."""
        if text is None:
            return None
        return text.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")


def build(corpora: Corpora) -> None:
    """Tokenise files or datasets into a corpus, which training maps into memory.

    The same command starts an interrupted build again, and leaves a finished one as it is. `longrnn
    info FOLDER` describes a corpus.

    Example: longrnn data build --out data/books --min-length 4k war_and_peace.txt don_quixote.txt
    """
    import numpy as np

    from longrnn.data.build import build as build_corpus
    from longrnn.data.stream import HEADER
    from longrnn.hf.tokenizer import load_tokenizer

    out, name = corpora.out, corpora.tokenizer
    read, is_built = load_tokenizer(name), (out / HEADER).is_file()
    try:
        header = build_corpus(
            corpora.data, read, out, reading=corpora, name=name, quiet=corpora.quiet
        )
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"{out} was not written") from error
    dtype = np.dtype(header.dtype).name
    made = f"{out} is built already" if is_built else str(out)
    typer.echo(f"{made}: {header.documents:,} documents, {header.tokens:,} tokens ({dtype})")
    if header.dropped_documents:
        why = "are too short" + (" or have no answer" if corpora.instruct else "")
        typer.echo(
            f"dropped: {header.dropped_documents:,} documents that {why}, "
            f"{header.dropped_tokens:,} tokens in all"
        )
