"""Reads documents from their sources and tokenizes them piece by piece into a corpus.

Notable choices:
- No file is loaded as a whole. A text is tokenized in chunks of about a million characters that
  end at a line end whose next line does not begin with a space: no common tokenizer has a token
  across such a border.
- What a build has read is recorded with the corpus that it writes. A build that was killed reads
  these items again, without tokenizing them, and continues.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from longrnn.corpus import HEADER, Header, digest, read_header
from longrnn.corpus_writer import CorpusWriter
from longrnn.errors import UserError
from longrnn.progress import Progress
from longrnn.text import Tokenizer
from longrnn.training.origins import Origin, Selection, TextFile, origins

CHUNK_CHARACTERS = 2**20
WHOLE = Selection()


class Piece(NamedTuple):
    """A part of a document.

    Attributes:
        text: may be empty.
        ends: whether it is the last part.
        is_all: whether the whole file, or row of a table, is this empty text.
    """

    text: str
    ends: bool
    is_all: bool = False


class Part(NamedTuple):
    """Tokens of a document.

    Attributes:
        ids: the tokens.
        ends: whether they are the last ones.
        scored: which of them belong to answers; None for texts without answers.
        size: about how many bytes of text they stand for.
        is_kept: false for a document that has nothing to train on.
    """

    ids: Sequence[int]
    ends: bool
    scored: Sequence[bool] | None = None
    size: int = 0
    is_kept: bool = True


class Reader(Protocol):
    """Makes documents of the items of a source, which are the unit of what has been read.

    Attributes:
        scored: whether the documents have answers.
    """

    scored: bool

    def items(self, origin: Origin, skip: int) -> Iterator[Any]:
        """Yields the items of a source without the first `skip`."""
        ...

    def parts(self, origin: Origin, item: Any) -> Iterator[Part]:
        """Tokenizes an item."""
        ...

    def options(self) -> Mapping[str, Any]:
        """What determines the tokens, besides the tokenizer and the sources."""
        ...


class TextReader:
    """Makes documents of text: an item is a piece of a text file or a row of a table.

    Args:
        tokenizer: makes the ids.
        split_on: separator of documents, which is dropped; None for one document per file or row.
        text_column: of tables.
        append_eos: whether documents end with the tokenizer's end-of-sequence token.

    Raises:
        UserError: an empty separator, or no end-of-sequence token.
    """

    scored = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        split_on: str | None = None,
        text_column: str = "text",
        append_eos: bool = False,
    ) -> None:
        if split_on == "":
            raise UserError("an empty text splits nothing: give a --split-on that is not empty")
        self.tokenizer, self.split_on, self.text_column = tokenizer, split_on, text_column
        self.append_eos = append_eos
        self._eos = end_of_sequence(tokenizer) if append_eos else []

    def items(self, origin: Origin, skip: int) -> Iterator[Piece | Mapping[str, Any]]:
        if not isinstance(origin, TextFile):
            return origin.rows(skip)
        return islice(pieces(read_chunks(origin.path), self.split_on), skip, None)

    def parts(self, origin: Origin, item: Piece | Mapping[str, Any]) -> Iterator[Part]:
        if isinstance(item, Piece):
            yield self._part(item)
            return
        text = item.get(self.text_column)
        if not isinstance(text, str):
            raise UserError(
                f"{origin.name} has a row without text in the column {self.text_column!r}: give "
                f"one of {', '.join(item)} as --text-column"
            )
        yield from map(self._part, pieces([text], self.split_on))

    def options(self) -> Mapping[str, Any]:
        return {"split_on": self.split_on, "column": self.text_column, "eos": self.append_eos}

    def _part(self, piece: Piece) -> Part:
        if piece.is_all:
            return Part([], True, is_kept=False)
        ids = self.tokenizer.encode(piece.text)
        end = self._eos if piece.ends else []
        return Part([*ids, *end], piece.ends, size=len(piece.text.encode()))


def end_of_sequence(tokenizer: Tokenizer) -> list[int]:
    """The id that ends a text, as a list.

    Raises:
        UserError: the tokenizer has none.
    """
    if tokenizer.eos_id is None:
        raise UserError(
            "the tokenizer has no end-of-sequence token to append: set append_eos=false, or name "
            "the eos_token in its tokenizer_config.json"
        )
    return [tokenizer.eos_id]


def build_corpus(
    data: Sequence[Path | str],
    tokenizer: Tokenizer,
    out: Path,
    *,
    name: str,
    reader: Reader | None = None,
    selection: Selection = WHOLE,
    split_on: str | None = None,
    text_column: str = "text",
    min_length: int = 2,
    max_tokens: int | None = None,
    quiet: bool = False,
) -> Header:
    """Writes the documents of files, folders and datasets, in their order, as a corpus.

    Args:
        data: what `longrnn.training.origins.origins` takes.
        tokenizer: makes the ids.
        out: the folder.
        name: the name by which `load_tokenizer` finds the tokenizer.
        reader: makes documents; by default a `TextReader` of `split_on` and `text_column`.
        selection: which part of datasets is read.
        split_on: see `TextReader`.
        text_column: see `TextReader`.
        min_length: documents of fewer tokens are dropped and counted.
        max_tokens: no document is read after the one that reaches this many tokens.
        quiet: print no progress.

    Returns:
        The header of the corpus; of the one in `out`, if that was made of the same in the same way.

    Raises:
        UserError: a source is missing, cannot be read or lacks the column; there is no document; or
            `out` holds something else. Nothing is left behind.
    """
    if min_length < 1 or (max_tokens is not None and max_tokens < 1):
        raise UserError("a corpus has documents: give a --min-length and --max-tokens of 1 or more")
    reader = reader or TextReader(tokenizer, split_on=split_on, text_column=text_column)
    sources = origins(data, selection)
    identity = identity_of(sources, tokenizer, reader, min_length, max_tokens)
    if (out / HEADER).is_file() and (found := read_header(out / HEADER)).identity == identity:
        return found
    sizes = [origin.size() for origin in sources]
    known = [size for size in sizes if size is not None]
    total = sum(known) if len(known) == len(sizes) else None
    with (
        CorpusWriter(
            out,
            tokenizer,
            name=name,
            min_length=min_length,
            scored=reader.scored,
            identity=identity,
        ) as writer,
        Progress("corpus (bytes)", total, unit="tokens", quiet=quiet) as progress,
    ):
        done = writer.written.source
        for number, (origin, size) in enumerate(zip(sources, sizes, strict=True)):
            if number >= done:
                _read(origin, size, reader, writer, progress, max_tokens)
            elif size:
                progress.advance(size, 0, Path(origin.name).name)
        texts_only = all(isinstance(origin, TextFile) for origin in sources)
        separator = reader.options().get("split_on")
        if separator is not None and texts_only and writer.written.ended == len(sources):
            raise UserError(
                f"{separator!r} is in none of the files: write what separates their documents (a "
                r"file with the line ends of Windows has \r\n where others have \n)"
            )
        return writer.publish([origin.name for origin in sources])


def identity_of(
    sources: Sequence[Origin],
    tokenizer: Tokenizer,
    reader: Reader,
    min_length: int,
    max_tokens: int | None,
) -> str:
    """A hash of what determines the content of a corpus, as far as can be seen without reading."""
    content = {
        "sources": [origin.identity() for origin in sources],
        "tokenizer": tokenizer.fingerprint(),
        "reader": [type(reader).__name__, dict(reader.options())],
        "lengths": [min_length, max_tokens],
    }
    return digest(json.loads(json.dumps(content)))


def _read(
    origin: Origin,
    size: int | None,
    reader: Reader,
    writer: CorpusWriter,
    progress: Progress,
    max_tokens: int | None,
) -> None:
    """Writes what is left of a source."""
    written, left = writer.written, size
    short = Path(origin.name).name
    for item in reader.items(origin, written.items):
        if max_tokens is not None and written.tokens >= max_tokens:
            break
        for part in reader.parts(origin, item):
            _write(part, writer)
            # A compressed table holds more bytes of text than its file has.
            read = part.size if left is None else min(left, part.size)
            left = None if left is None else left - read
            if read:
                progress.advance(read, len(part.ids), short)
        written.items += 1
        writer.record()
    if left:
        progress.advance(left, 0, short)
    written.source, written.items = written.source + 1, 0


def _write(part: Part, writer: CorpusWriter) -> None:
    if not part.is_kept:
        writer.drop(len(part.ids))
        return
    is_empty = part.ends and not writer.open_tokens() and not part.size
    if not is_empty:
        writer.write(part.ids, part.scored)
    if part.ends:
        writer.end_document()


def pieces(chunks: Iterable[str], split_on: str | None) -> Iterator[Piece]:
    """Splits a text that comes in chunks into pieces of documents."""
    rest, is_empty = "", True
    for chunk in chunks:
        rest += chunk
        is_empty = is_empty and not chunk
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
    yield Piece("", True, is_empty)


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
    """Yields a UTF-8 text file in chunks, without its byte-order mark.

    Raises:
        UserError: the file is not UTF-8 text.
    """
    remedy = "give a file of UTF-8 text"
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        mark = len(codecs.BOM_UTF8)
        start = mark if file.read(mark) == codecs.BOM_UTF8 else 0
        file.seek(start)
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
