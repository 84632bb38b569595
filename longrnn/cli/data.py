"""`longrnn data …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.options import Quiet

app = typer.Typer(
    help="Corpora to train on.",
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
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, a checkpoint, a tokenizer.json, or a folder with one.")
    ] = "bytes",
    split_on: Annotated[
        str | None,
        typer.Option(
            help="Text that separates documents inside a file, such as '<|endoftext|>', or "
            r"'\n\n\n' for two blank lines (\n, \r and \t are understood).",
            show_default="one document a file, or a row of a table",
        ),
    ] = None,
    text_column: Annotated[str, typer.Option(help="Column of a table.")] = "text",
    min_length: Annotated[
        str, typer.Option(help="Documents of fewer tokens are dropped and counted.")
    ] = "2",
    quiet: Quiet = False,
) -> None:
    """Tokenise files into a corpus that training maps into memory.

    Example: longrnn data build --out data/books --min-length 4k war_and_peace.txt don_quixote.txt
    """
    from longrnn.hf.tokenizer import load_tokenizer
    from longrnn.training.documents import build_corpus
    from longrnn.units import parse_length

    marker = split_on
    for written, meant in ((r"\n", "\n"), (r"\r", "\r"), (r"\t", "\t")):
        marker = marker.replace(written, meant) if marker is not None else None
    try:
        header = build_corpus(
            files,
            load_tokenizer(tokenizer),
            out,
            name=tokenizer,
            split_on=marker,
            text_column=text_column,
            min_length=parse_length(min_length),
            quiet=quiet,
        )
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"{out} was not written: give the command again") from error
    typer.echo(f"{out}: {header.documents:,} documents, {header.tokens:,} tokens ({header.dtype})")
    if header.dropped_documents:
        typer.echo(
            f"dropped: {header.dropped_documents:,} documents of fewer than {header.min_length:,} "
            f"tokens, {header.dropped_tokens:,} tokens in all"
        )


@app.command()
def check(
    corpus: Annotated[Path, typer.Argument(help="What `longrnn data build` wrote.")],
) -> None:
    """Say what a corpus holds, and compare its files with their checksums.

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
