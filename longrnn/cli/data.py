"""`longrnn data …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.options import Quiet

app = typer.Typer(
    help="Build and check corpora to train on.",
    epilog="Example: longrnn data build --out data/books book1.txt book2.txt",
    no_args_is_help=True,
)


@app.command()
def build(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="UTF-8 text files, or tables with a text column: .jsonl, .json, .csv, .parquet.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist yet.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="Tokenizer: bytes, a checkpoint, a tokenizer.json, or a folder with one."
        ),
    ] = "bytes",
    split_on: Annotated[
        str | None,
        typer.Option(
            help="Text that separates documents inside a file, such as '<|endoftext|>', or "
            r"'\n\n\n' for two blank lines (\n, \r and \t are escapes).",
            show_default="one document per file, or per row of a table",
        ),
    ] = None,
    text_column: Annotated[
        str, typer.Option(help="Column of a table that holds the text.")
    ] = "text",
    min_length: Annotated[
        str, typer.Option(help="Drop documents with fewer tokens than this.")
    ] = "2",
    quiet: Quiet = False,
) -> None:
    """Tokenise files into a corpus, which training maps into memory.

    Example: longrnn data build --out data/books --min-length 4k war_and_peace.txt don_quixote.txt
    """
    from longrnn.hf.tokenizer import load_tokenizer
    from longrnn.training.documents import build_corpus
    from longrnn.units import parse_length

    separator = split_on
    for escape, character in ((r"\n", "\n"), (r"\r", "\r"), (r"\t", "\t")):
        separator = separator.replace(escape, character) if separator is not None else None
    try:
        header = build_corpus(
            files,
            load_tokenizer(tokenizer),
            out,
            name=tokenizer,
            split_on=separator,
            text_column=text_column,
            min_length=parse_length(min_length),
            quiet=quiet,
        )
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"{out} was not written: run the command again") from error
    typer.echo(f"{out}: {header.documents:,} documents, {header.tokens:,} tokens ({header.dtype})")
    if header.dropped_documents:
        typer.echo(
            f"dropped: {header.dropped_documents:,} documents of fewer than {header.min_length:,} "
            f"tokens, {header.dropped_tokens:,} tokens in all"
        )


@app.command()
def check(
    corpus: Annotated[Path, typer.Argument(help="Folder that `longrnn data build` wrote.")],
) -> None:
    """Describe a corpus, and compare its files with their checksums.

    Example: longrnn data check data/books
    """
    from longrnn.corpus import Corpus

    found = Corpus(corpus)
    found.verify()
    header, lengths = found.header, sorted(found.lengths.tolist())
    rows = {
        "tokenizer": f"{header.tokenizer} ({header.fingerprint}, {header.vocab_size:,} ids)",
        "documents": f"{header.documents:,}",
        "tokens": f"{header.tokens:,} ({header.dtype})",
        "lengths": f"{lengths[0]:,} to {lengths[-1]:,}, median {lengths[len(lengths) // 2]:,}",
        "dropped": f"{header.dropped_documents:,} documents of fewer than {header.min_length:,}",
        "checksums": "right",
    }
    for name, value in rows.items():
        typer.echo(f"{name:<12}{value}")
