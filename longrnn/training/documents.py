"""Reads documents from files and tokenizes them piece by piece into a corpus.

Notable choices:
- No file is loaded as a whole. A text is tokenized in chunks of about a million characters that
  end at a line end whose next line does not begin with a space: no common tokenizer has a token
  across such a border.
- The suffix decides: `.jsonl`, `.json`, `.csv` and `.parquet` are tables with a text column, read
  by the `datasets` library, one document per row; all other files are UTF-8 text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from longrnn.corpus import Header
from longrnn.corpus_writer import CorpusWriter
from longrnn.errors import UserError
from longrnn.progress import Progress
from longrnn.text import Tokenizer

CHUNK_CHARACTERS = 2**20
TABLES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


class Piece(NamedTuple):
    """A part of a document; `ends`: whether it is the last part."""

    text: str
    ends: bool


def build_corpus(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    out: Path,
    *,
    name: str,
    split_on: str | None = None,
    text_column: str = "text",
    min_length: int = 2,
    quiet: bool = False,
) -> Header:
    """Writes the documents of files, in their order, as a corpus.

    Args:
        files: UTF-8 text, or tables (see the module).
        tokenizer: makes the ids.
        out: the folder, which must not exist.
        name: the name by which `load_tokenizer` finds the tokenizer.
        split_on: separator of documents, which is dropped; by default a document is a file, or a
            row of a table.
        text_column: name of the text column of tables.
        min_length: documents of fewer tokens are dropped and counted.
        quiet: print no progress.

    Raises:
        UserError: a file is missing, is not text or lacks the column; there is no document; or
            `out` exists. Nothing is left behind.
    """
    if min_length < 1 or split_on == "":
        raise UserError(
            "a corpus needs --min-length 1 or more, and a --split-on that is not empty: set both"
        )
    for path in files:
        if not path.is_file():
            raise UserError(f"no file {path}: give files of UTF-8 text, or tables")
    sizes = [path.stat().st_size for path in files]
    with (
        CorpusWriter(out, tokenizer, name=name, min_length=min_length) as writer,
        Progress("corpus (bytes)", sum(sizes), unit="tokens", quiet=quiet) as progress,
    ):
        ended = 0
        for path, left in zip(files, sizes, strict=True):
            for piece in documents(path, split_on, text_column):
                ids = tokenizer.encode(piece.text)
                writer.write(ids)
                if piece.ends:
                    writer.end_document()
                    ended += 1
                # A compressed table holds more bytes of text than its file has.
                read = min(left, len(piece.text.encode()))
                left -= read
                if read:
                    progress.advance(read, len(ids), path.name)
            if left:
                progress.advance(left, 0, path.name)
        if split_on is not None and ended == len(files):
            raise UserError(
                f"{split_on!r} is in none of the files: write what separates their documents (a "
                r"file with the line ends of Windows has \r\n where others have \n)"
            )
        return writer.publish([str(path) for path in files])


def documents(path: Path, split_on: str | None, text_column: str) -> Iterator[Piece]:
    """Yields the documents of a file in pieces; an empty last piece ends a document."""
    kind = TABLES.get(path.suffix.lower())
    if kind is None:
        yield from pieces(read_chunks(path), split_on)
        return
    for text in read_rows(path, kind, text_column):
        yield from pieces([text], split_on)


def pieces(chunks: Iterable[str], split_on: str | None) -> Iterator[Piece]:
    """Splits a text that comes in chunks into pieces of documents."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        if split_on is not None:
            *whole, rest = rest.split(split_on)
            for text in whole:
                yield from _parts(text)
                yield Piece("", True)
        # The end of a chunk may be the beginning of a separator: it waits for the next chunk.
        held = 0 if split_on is None else len(split_on) - 1
        if len(rest) - held >= CHUNK_CHARACTERS:
            cut = _line_end(rest, len(rest) - held)
            yield from _parts(rest[:cut])
            rest = rest[cut:]
    yield from _parts(rest)
    yield Piece("", True)


def _parts(text: str) -> Iterator[Piece]:
    while len(text) > CHUNK_CHARACTERS:
        cut = _line_end(text, CHUNK_CHARACTERS)
        yield Piece(text[:cut], False)
        text = text[cut:]
    yield Piece(text, False)


def _line_end(text: str, before: int) -> int:
    """The last index up to `before` where a line begins without a space; `before` if none does.

    The character after `before` may not be known yet, so `before` itself is not considered.
    """
    place = text.rfind("\n", 0, before - 1)
    while place > 0 and text[place + 1].isspace():
        place = text.rfind("\n", 0, place)
    return place + 1 if place > 0 else before


def read_chunks(path: Path) -> Iterator[str]:
    """Yields a UTF-8 text file in chunks.

    Raises:
        UserError: the file is not UTF-8 text.
    """
    remedy = "give a file of UTF-8 text"
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        start = 0
        while data := file.read(CHUNK_CHARACTERS):
            if 0 in data:
                raise UserError(
                    f"{path} is binary (a NUL at byte {start + data.index(0)}): {remedy}"
                )
            pending = len(decoder.getstate()[0])
            yield _decode(decoder, data, path, start - pending)
            start += len(data)
        pending = len(decoder.getstate()[0])
        yield _decode(decoder, b"", path, start - pending, final=True)


def _decode(
    decoder: codecs.IncrementalDecoder, data: bytes, path: Path, start: int, final: bool = False
) -> str:
    try:
        return decoder.decode(data, final)
    except UnicodeDecodeError as error:
        place = start + error.start
        raise UserError(
            f"{path} is not UTF-8 (at byte {place}): give a file of UTF-8 text"
        ) from error


def read_rows(path: Path, kind: str, text_column: str) -> Iterator[str]:
    """Yields the text column of a table, row by row.

    Args:
        path: the table.
        kind: its format, as `datasets` names it.
        text_column: name of the column.

    Raises:
        UserError: the table cannot be read, or lacks the column.
    """
    try:
        from datasets import load_dataset, logging
    except ImportError as error:
        raise UserError(
            f"{path} is a table and the datasets library is not installed: "
            "pip install 'longrnn[data]'"
        ) from error

    logging.set_verbosity(logging.CRITICAL)  # its report would repeat the error message below
    try:
        rows = iter(load_dataset(kind, data_files=str(path), split="train", streaming=True))
        row = next(rows, None)
        while row is not None:
            if not isinstance(row.get(text_column), str):
                raise UserError(
                    f"{path} has a row without text in the column {text_column!r}: give one of "
                    f"{', '.join(row)} as --text-column"
                )
            yield row[text_column]
            row = next(rows, None)
    except (UserError, OSError):
        raise
    except Exception as error:  # datasets and pyarrow raise many kinds
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be read as {kind} ({reason}): write it again") from error
