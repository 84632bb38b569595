"""`longrnn data build`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.command import Argument
from longrnn.evaluation.options import Documents
from longrnn.text import Reading
from longrnn.units import counted


class Corpora(Reading):
    """Documents, and how they become a corpus."""

    data: Annotated[list[Documents], Argument("DATA")]
    """UTF-8 text files, tables (.jsonl, .json, .csv, .parquet), folders of them, bundled:moby_dick,
    or names of datasets on the Hugging Face Hub."""
    out: Path
    """Folder to write."""
    tokenizer: str = "bytes"
    """Tokenizer: bytes, a checkpoint, a tokenizer.json, or a folder with that file."""


def build(corpora: Corpora) -> None:
    """Tokenise files or datasets into a corpus, which training maps into memory.

    The same command starts an interrupted build again, and leaves a finished corpus as it is.
    `longrnn info FOLDER` describes a corpus.

    Example: longrnn data build --out data/books --min-length 4k war_and_peace.txt don_quixote.txt
    """
    from longrnn.data.build import build as build_corpus
    from longrnn.data.stream import HEADER
    from longrnn.hf.tokenizer import load_tokenizer

    out, name = corpora.out, corpora.tokenizer
    read, is_built = load_tokenizer(name), (out / HEADER).is_file()
    header = build_corpus(corpora.data, read, out, reading=corpora, name=name)
    made = f"{out} is built already" if is_built else str(out)
    typer.echo(f"{made}: {counted(header.documents, 'document')}, {header.tokens:,} tokens")
    if header.dropped_documents:
        dropped = counted(header.dropped_documents, "document")
        typer.echo(f"dropped: {dropped}, too short or without an answer")
