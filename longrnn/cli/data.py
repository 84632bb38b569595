"""`longrnn data …`."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from longrnn.cli.options import Quiet
from longrnn.errors import UserError

app = typer.Typer(
    help="Build and check corpora to train on.",
    epilog="Example: longrnn data build --out data/books book1.txt book2.txt",
    no_args_is_help=True,
)


@app.command()
def build(
    data: Annotated[
        list[str],
        typer.Argument(
            help="UTF-8 text files, tables (.jsonl, .json, .csv, .parquet), folders of them, "
            "folders of save_to_disk, or names of datasets on the Hugging Face Hub.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="Tokenizer: bytes, a checkpoint, a tokenizer.json, or a folder with one."
        ),
    ] = "bytes",
    instruct: Annotated[
        bool,
        typer.Option(
            "--instruct",
            help="Read rows with prompt and completion, or messages, for the task instruct.",
        ),
    ] = False,
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
    split: Annotated[str, typer.Option(help="Split of a dataset.")] = "train",
    subset: Annotated[
        str | None, typer.Option(help="Configuration of a dataset that has several.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a dataset on the Hub.")
    ] = None,
    append_eos: Annotated[
        bool | None,
        typer.Option(
            "--append-eos/--no-append-eos",
            help="End each document (or completion) with the end-of-sequence token.",
            show_default="only with --instruct",
        ),
    ] = None,
    min_length: Annotated[
        str, typer.Option(help="Drop documents with fewer tokens than this.")
    ] = "2",
    max_tokens: Annotated[
        str | None,
        typer.Option(
            help="Stop after the document that reaches this many tokens.", show_default="no limit"
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Tokenise files or datasets into a corpus, which training maps into memory.

    The same command starts an interrupted build again, and leaves a finished one as it is.

    Example: longrnn data build --out data/books --min-length 4k war_and_peace.txt don_quixote.txt
    """
    import numpy as np

    from longrnn.data.build import build as build_corpus
    from longrnn.data.sources import Reading
    from longrnn.data.stream import HEADER
    from longrnn.hf.tokenizer import load_tokenizer
    from longrnn.units import parse_length

    separator = split_on
    for escape, character in ((r"\n", "\n"), (r"\r", "\r"), (r"\t", "\t")):
        separator = separator.replace(escape, character) if separator is not None else None
    if instruct and (separator is not None or text_column != "text"):
        raise UserError(
            "--instruct reads prompt and completion, or messages: leave out --split-on and "
            "--text-column"
        )
    reading = Reading(
        answers=instruct,
        split=split,
        subset=subset,
        revision=revision,
        text_column=text_column,
        split_on=separator,
        append_eos=instruct if append_eos is None else append_eos,
        min_length=parse_length(min_length),
        max_tokens=None if max_tokens is None else parse_length(max_tokens),
    )
    read, is_built = load_tokenizer(tokenizer), (out / HEADER).is_file()
    try:
        header = build_corpus(data, read, out, reading=reading, name=tokenizer, quiet=quiet)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"{out} was not written") from error
    dtype = np.dtype(header.dtype).name
    made = f"{out} is built already" if is_built else str(out)
    typer.echo(f"{made}: {header.documents:,} documents, {header.tokens:,} tokens ({dtype})")
    if header.dropped_documents:
        typer.echo(
            f"dropped: {header.dropped_documents:,} documents that are too short"
            f"{' or have no answer' if instruct else ''}, {header.dropped_tokens:,} tokens in all"
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
