"""`longrnn data …`."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from pydantic import Field, field_validator

from longrnn.cli.command import command
from longrnn.text import Reading

app = typer.Typer(
    help="Build and check corpora to train on.",
    epilog="Example: longrnn data build --out data/books book1.txt book2.txt",
    no_args_is_help=True,
)


class BuildOptions(Reading):
    """What a corpus is made of, and where it goes."""

    data: list[str] = Field(
        description="UTF-8 text files, tables (.jsonl, .json, .csv, .parquet), folders of them, "
        "folders of save_to_disk, or names of datasets on the Hugging Face Hub.",
    )
    out: Path = Field(description="Folder to write.")
    tokenizer: str = Field(
        default="bytes",
        description="Tokenizer: bytes, a checkpoint, a tokenizer.json, or a folder with one.",
    )
    quiet: bool = Field(default=False, description="Show no progress.")

    @field_validator("split_on")
    @classmethod
    def _without_escapes(cls, text: str | None) -> str | None:
        """Line ends and tabs in the place of `\\n`, `\\r` and `\\t`."""
        if text is None:
            return None
        return text.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")


@command(app, "build")
def build(options: BuildOptions) -> None:
    """Tokenise files or datasets into a corpus, which training maps into memory.

    The same command starts an interrupted build again, and leaves a finished one as it is.

    Example: longrnn data build --out data/books --min-length 4k war_and_peace.txt don_quixote.txt
    """
    import numpy as np

    from longrnn.data.build import build as build_corpus
    from longrnn.data.stream import HEADER
    from longrnn.hf.tokenizer import load_tokenizer

    out, name = options.out, options.tokenizer
    read, is_built = load_tokenizer(name), (out / HEADER).is_file()
    try:
        header = build_corpus(
            options.data, read, out, reading=options, name=name, quiet=options.quiet
        )
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"{out} was not written") from error
    dtype = np.dtype(header.dtype).name
    made = f"{out} is built already" if is_built else str(out)
    typer.echo(f"{made}: {header.documents:,} documents, {header.tokens:,} tokens ({dtype})")
    if header.dropped_documents:
        why = "are too short" + (" or have no answer" if options.instruct else "")
        typer.echo(
            f"dropped: {header.dropped_documents:,} documents that {why}, "
            f"{header.dropped_tokens:,} tokens in all"
        )


@app.command()
def check(
    corpus: Annotated[Path, typer.Argument(help="Folder that `longrnn data build` wrote.")],
) -> None:
    """Describe a corpus, and compare its files with their checksums.

    Example: longrnn data check data/books
    """
    import numpy as np

    from longrnn.data.stream import Corpus

    found = Corpus(corpus)
    header, lengths = found.header, sorted((found.spans[:, 1] - found.spans[:, 0]).tolist())
    rows = {
        "tokenizer": f"{header.tokenizer} ({header.fingerprint}, {header.vocab_size:,} ids)",
        "documents": f"{header.documents:,}",
        "tokens": f"{header.tokens:,} ({np.dtype(header.dtype).name})",
        "lengths": f"{lengths[0]:,} to {lengths[-1]:,}, median {median(lengths):,.0f}",
        "dropped": f"{header.dropped_documents:,} documents",
        "checksums": "right",
    }
    if header.scored_tokens is not None:
        share = header.scored_tokens / header.tokens
        rows["answers"] = f"{header.scored_tokens:,} tokens ({share:.1%})"
    for name, value in rows.items():
        typer.echo(f"{name:<12}{value}")
