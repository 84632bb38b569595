"""Reads documents from text files, tables and datasets, and tokenizes them.

A source is

- a text file, which is one document, or several with a separator;
- a `.jsonl`, `.json`, `.csv` or `.parquet` file, with one document per row;
- a folder with tables, as `datasets.load_dataset` reads it; any other folder stands for the text
  files in it and below;
- the name of a dataset on the Hugging Face Hub, which is streamed.

A document is a text; or a `prompt` with its `completion`, or `messages`, a list of
`{"role": …, "content": …}` that goes through the chat template of the tokenizer. Prompt and
completion are tokenized separately, as they are when a model answers a prompt.

Notable choice: a text is tokenized in pieces of about a million characters that end at a line end
whose next line does not begin with a space: no common tokenizer has a token across such a border.
Many pieces at a time are given to the tokenizer, whose fast form then uses all cores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longrnn.data.stream import HEADER
from longrnn.errors import UserError
from longrnn.files import one_line
from longrnn.text import TEXT_SUFFIXES, Reading, Tokenizer, files_below, read_text

PIECE_CHARACTERS, PIECES = 2**20, 64
# The formats of tables, as `datasets` names them, by suffix. In folders .json is left out, where it
# is as often a configuration.
TABLES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Source(NamedTuple):
    """One source of documents.

    Attributes:
        name: as the user gave it.
        kind: `text`, or what `datasets.load_dataset` takes as its first argument.
        files: the files that are read; empty where they are not known.
    """

    name: str
    kind: str
    files: Sequence[Path]

    def identity(self) -> list[Any]:
        """What changes whenever the content does, as far as that can be seen without reading it."""
        stats = [(path, path.stat()) for path in self.files]
        return [self.name, *([str(p.resolve()), s.st_size, s.st_mtime_ns] for p, s in stats)]


def sources(data: Sequence[str]) -> list[Source]:
    """What files, folders and names of datasets stand for.

    Raises:
        UserError: one of them does not exist, or is a folder without anything to read.
    """
    found: list[Source] = []
    for given in map(str, data):
        path = Path(given).expanduser()
        if path.is_file():
            kind = TABLES.get(path.suffix.lower(), "text")
            found.append(Source(given, kind, [path]))
        elif not path.is_dir():
            if path.exists() or not HUB_NAME.fullmatch(given) or path.suffix:
                raise UserError(
                    f"no file {given}: give files or folders of UTF-8 text or tables, or the name "
                    "of a dataset on the Hub such as organisation/name"
                )
            found.append(Source(given, given, []))
        elif (path / HEADER).is_file():
            raise UserError(f"{path} is tokenized already: give it alone, as the data to train on")
        elif tables := files_below(path, set(TABLES) - {".json"}):
            found.append(Source(given, str(path), tables))
        elif texts := files_below(path):
            found += [Source(str(text), "text", [text]) for text in texts]
        else:
            raise UserError(
                f"no file to train on in {path}: a folder is searched for "
                f"{', '.join([*TEXT_SUFFIXES, *sorted(set(TABLES) - {'.json'})])}; rename the "
                "files, or name each of them"
            )
    return found


class Piece(NamedTuple):
    """A part of a document: a text to tokenize, or tokens; `ends`: whether it is the last part."""

    text: str
    ends: bool
    ids: Sequence[int] | None = None
    scored: Sequence[bool] = ()
    is_answer: bool = False


def documents(
    source: Source, tokenizer: Tokenizer, reading: Reading
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Yields the documents of a source, in their order.

    Yields:
        Their ids `(n,)`, and which of them belong to answers `(n,)`.

    Raises:
        UserError: it cannot be read, or lacks the columns.
    """
    ids: list[NDArray[np.int64]] = []
    scored: list[NDArray[np.bool_]] = []
    pieces = _pieces(source, tokenizer, reading)
    end = [tokenizer.eos_id] if reading.appends_eos(tokenizer) else []
    while group := list(islice(pieces, PIECES)):
        made = iter(tokenizer.encode_many([piece.text for piece in group if piece.ids is None]))
        for piece in group:
            own = next(made) if piece.ids is None else piece.ids
            if piece.ends and piece.ids is None and own:
                own = [*own, *end]
            ids.append(np.array(own, dtype=np.int64))
            scored.append(np.array(piece.scored or [piece.is_answer] * len(own), dtype=bool))
            if piece.ends:
                yield np.concatenate(ids), np.concatenate(scored)
                ids, scored = [], []


def _pieces(source: Source, tokenizer: Tokenizer, reading: Reading) -> Iterator[Piece]:
    """The documents of a source."""
    if source.kind == "text" and reading.instruct:
        raise UserError(
            f"{source.name} is a text and rows with prompts and answers are needed: give a .jsonl, "
            ".json, .csv or .parquet file, or a dataset"
        )
    if source.kind == "text":
        if source.files[0].stat().st_size:
            yield from _text(read_text(source.files[0])[0], reading.split_on)
        return
    for number, row in enumerate(_rows(source, reading), 1):
        if reading.instruct:
            yield from _answered(row, tokenizer, f"{source.name}, row {number},")
            continue
        text = row.get(reading.text_column)
        if not isinstance(text, str):
            raise UserError(
                f"{source.name} has a row without text in the column {reading.text_column!r}: give "
                f"one of {', '.join(row)} as text_column"
            )
        yield from _text(text, reading.split_on)


def _text(text: str, split_on: str | None) -> Iterator[Piece]:
    """The pieces of the documents of a text."""
    for document in text.split(split_on) if split_on is not None else [text]:
        while len(document) > PIECE_CHARACTERS:
            cut = _line_end(document, PIECE_CHARACTERS)
            yield Piece(document[:cut], False)
            document = document[cut:]
        yield Piece(document, True)


def _line_end(text: str, before: int) -> int:
    """The last index up to `before` where a line begins without a space; `before` if none does."""
    place = text.rfind("\n", 0, before)
    while place > 0 and text[place + 1].isspace():
        place = text.rfind("\n", 0, place)
    return place + 1 if place > 0 else before


def _answered(row: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> Iterator[Piece]:
    """The pieces of one document of prompts and answers."""
    messages, prompt, completion = (row.get(one) for one in ("messages", "prompt", "completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
        yield Piece(prompt, False)
        yield Piece(completion, True, is_answer=True)
        return
    if not isinstance(messages, list) or not all(
        isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in messages
    ):
        raise UserError(
            f"{where} has neither the texts prompt and completion nor messages, a list of mappings "
            f"with role and content, but {', '.join(row) or 'nothing'}: write it so"
        )
    try:
        yield Piece("", True, *tokenizer.encode_chat(messages))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            f"{where} cannot be used ({error}): correct the template or leave the row out"
        ) from error


def _rows(source: Source, reading: Reading) -> Iterator[Mapping[str, Any]]:
    """The rows of a table or dataset, none of which is loaded as a whole."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "tables and datasets need the datasets library, which is not installed: pip install "
            "datasets"
        ) from error
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    options: dict[str, Any] = {"path": source.kind, "streaming": True, "split": "train"}
    if source.kind in TABLES.values():
        options["data_files"] = str(source.files[0])
    else:
        given = {"split": reading.split, "name": reading.subset, "revision": reading.revision}
        options |= {name: value for name, value in given.items() if value is not None}
    try:
        yield from datasets.load_dataset(**options)
    except Exception as error:  # of datasets or pyarrow, of many kinds
        # datasets raises OSErrors without a number for names on the Hub.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(
            f"{source.name} cannot be read ({one_line(error)}): write the file again, or check the "
            "name, split, subset and revision of the dataset, and the network"
        ) from error
