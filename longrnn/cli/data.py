"""`longrnn data build`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.command import Argument
from longrnn.cli.options import Quiet
from longrnn.errors import UserError
from longrnn.options import Tokens


class Corpora(Quiet):
    """Documents, and how they become a corpus."""

    data: Annotated[list[str], Argument("DATA")]
    """UTF-8 text files, tables (.jsonl, .json, .csv, .parquet), folders of them, folders of
    save_to_disk, or names of datasets on the Hugging Face Hub."""
    out: Path
    """Folder to write."""
    tokenizer: str = "bytes"
    """Tokenizer: bytes, a checkpoint, a tokenizer.json, or a folder with one."""
    instruct: bool = False
    """Read rows with prompt and completion, or messages, for the task instruct; each completion
    ends with the end-of-sequence token."""
    split_on: str | None = None
    r"""Text that separates documents inside a file, such as '<|endoftext|>', or '\n\n\n' for two
    blank lines (default: one document per file, or per row of a table)."""
    text_column: str = "text"
    """Column of a table that holds the text."""
    split: str = "train"
    """Split of a dataset."""
    subset: str | None = None
    """Configuration of a dataset that has several."""
    append_eos: bool = False
    """End each document with the end-of-sequence token."""
    min_length: Tokens = 2
    """Drop documents with fewer tokens than this."""
    max_tokens: Tokens | None = None
    """Stop after the document that reaches this many tokens."""


def build(corpora: Corpora) -> None:
    """Tokenise files or datasets into a corpus, which training maps into memory.

    The same command starts an interrupted build again, and leaves a finished one as it is. `longrnn
    info FOLDER` describes a corpus.

    Example: longrnn data build --out data/books --min-length 4k war_and_peace.txt don_quixote.txt
    """
    import numpy as np

    from longrnn.data.build import build as build_corpus
    from longrnn.data.sources import Reading
    from longrnn.data.stream import HEADER
    from longrnn.hf.tokenizer import load_tokenizer

    separator, out, is_instruct = corpora.split_on, corpora.out, corpora.instruct
    for escape, character in ((r"\n", "\n"), (r"\r", "\r"), (r"\t", "\t")):
        separator = separator.replace(escape, character) if separator is not None else None
    if is_instruct and (separator is not None or corpora.text_column != "text"):
        raise UserError(
            "--instruct reads prompt and completion, or messages: leave out --split-on and "
            "--text-column"
        )
    read = load_tokenizer(corpora.tokenizer)
    reading = Reading(
        answers=is_instruct,
        split=corpora.split,
        subset=corpora.subset,
        text_column=corpora.text_column,
        split_on=separator,
        append_eos=corpora.append_eos or (is_instruct and read.eos_id is not None),
        min_length=corpora.min_length,
        max_tokens=corpora.max_tokens,
    )
    is_built = (out / HEADER).is_file()
    how = {"reading": reading, "name": corpora.tokenizer, "quiet": corpora.quiet}
    try:
        header = build_corpus(corpora.data, read, out, **how)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"{out} was not written") from error
    dtype = np.dtype(header.dtype).name
    made = f"{out} is built already" if is_built else str(out)
    typer.echo(f"{made}: {header.documents:,} documents, {header.tokens:,} tokens ({dtype})")
    if header.dropped_documents:
        typer.echo(
            f"dropped: {header.dropped_documents:,} documents that are too short"
            f"{' or have no answer' if is_instruct else ''}, {header.dropped_tokens:,} tokens "
            "in all"
        )
