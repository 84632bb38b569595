"""Reads documents from text files, tables and datasets, and tokenizes them.

A document is a text; or a `prompt` with its `completion`, or `messages`, a list of
`{"role": …, "content": …}` that goes through the chat template of the tokenizer. Prompt and
completion are tokenized separately, as they are when a model answers a prompt.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longrnn.errors import UserError, require
from longrnn.files import one_line, read_text
from longrnn.text import Reading, Tokenizer

# The formats of tables, as `datasets` names them, by suffix.
TABLES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
# What is read of a folder; a .json file is as often a configuration.
IN_FOLDERS = (".txt", ".text", ".md", ".jsonl", ".csv", ".parquet")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# A long text is tokenized in pieces, so that the tokenizer uses all cores: about a million
# characters, up to a line end without spaces around it. No common tokenizer has a token across it.
TEXT_PIECE = re.compile(r".{1000000,}?\S\n(?=\S)|.+", re.DOTALL)
# Pieces that one call tokenizes.
PIECES_PER_CALL = 64


def sources(data: Sequence[str]) -> list[Path | str]:
    """The files, and the names of datasets on the Hub, that `data` names.

    Raises:
        UserError: one of them does not exist, or is a folder without anything to read.
    """
    listed: list[Path | str] = []
    for given in data:
        path = Path(os.path.realpath(os.path.expanduser(given)))
        inside: list[Path | str] = []
        if os.path.isdir(path):
            inside += _files_in(path)
        elif os.path.isfile(path):
            inside = [path]
        elif HUB_NAME.fullmatch(given) and not path.suffix:
            inside = [given]
        if not inside:
            raise UserError(
                f"no file to train on at {given}: give files of UTF-8 text or tables, folders with "
                f"{', '.join(IN_FOLDERS)}, or a dataset on the Hub such as organisation/name"
            )
        listed += inside
    return listed


def _files_in(folder: Path) -> list[Path]:
    """The texts and tables in a folder and below, by path; each once, whatever links there are.

    Raises:
        UserError: one is a link to nothing.
    """
    distinct: dict[Path, Path] = {}
    for name in sorted(map(Path, glob("**", root_dir=folder, recursive=True))):
        file = Path(os.path.realpath(folder / name))
        if name.suffix.lower() in IN_FOLDERS and not file.is_dir():
            if not file.exists():
                raise UserError(
                    f"{folder / name} links to {file}, which does not exist: remove the link"
                )
            distinct.setdefault(file, folder / name)
    return [*distinct.values()]


class Piece(NamedTuple):
    """A part of a document.

    Attributes:
        text: to tokenize; empty if there are `ids`.
        ends: whether it is the last part.
        is_answer: whether all tokens of the text belong to an answer.
        ids: of a conversation, which its template has tokenized.
        scored: which of them belong to an answer.
    """

    text: str
    ends: bool = True
    is_answer: bool = False
    ids: Sequence[int] = ()
    scored: Sequence[bool] = ()


def documents(
    source: Path | str, tokenizer: Tokenizer, reading: Reading
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
    if reading.append_eos and tokenizer.eos_id is None:
        raise UserError(
            "the tokenizer has no end-of-sequence token to append: leave append_eos out, or name "
            "the eos_token in its tokenizer_config.json"
        )
    has_end = (reading.append_eos or reading.instruct) and tokenizer.eos_id is not None
    end = [tokenizer.eos_id] if has_end else []
    while group := list(islice(pieces, PIECES_PER_CALL)):
        encoded = tokenizer.encode_many([piece.text for piece in group])
        for piece, text_ids in zip(group, encoded, strict=True):
            piece_ids = piece.ids or ([*text_ids, *end] if text_ids and piece.ends else text_ids)
            marks = piece.scored or [piece.is_answer] * len(piece_ids)
            ids.append(np.array(piece_ids, dtype=np.int64))
            scored.append(np.array(marks, dtype=bool))
            if piece.ends:
                whole, marks = np.concatenate(ids), np.concatenate(scored)
                bos = None if piece.ids else tokenizer.bos_id  # a chat template has its own
                if bos is not None and len(whole) and whole[0] != bos:
                    whole, marks = np.insert(whole, 0, bos), np.insert(marks, 0, False)
                yield whole, marks
                ids, scored = [], []


def _pieces(source: Path | str, tokenizer: Tokenizer, reading: Reading) -> Iterator[Piece]:
    """The documents of a source."""
    for number, row in enumerate(_rows(source, reading), 1):
        if reading.instruct:
            yield from _answered(row, tokenizer, f"{source}, row {number},")
            continue
        text = row.get(reading.text_column)
        if not isinstance(text, str):
            raise UserError(
                f"{source} has a row without text in the column {reading.text_column!r}: build a "
                f"corpus with `longrnn data build` and --text-column, one of {', '.join(row)}"
            )
        for document in [text] if reading.split_on is None else text.split(reading.split_on):
            *first, last = TEXT_PIECE.findall(document) or [""]
            yield from (Piece(piece, ends=False) for piece in first)
            yield Piece(last)


def _answered(row: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> Iterator[Piece]:
    """The pieces of one document of prompts and answers."""
    messages, prompt, completion = map(row.get, ("messages", "prompt", "completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
        yield Piece(prompt, ends=False)
        yield Piece(completion, is_answer=True)
        return
    if not isinstance(messages, list) or not all(
        isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in messages
    ):
        raise UserError(
            f"{where} has neither the texts prompt and completion nor messages, a list of mappings "
            f"with role and content, but {', '.join(row)}: write it so"
        )
    try:
        ids, scored = tokenizer.encode_chat(messages)
    except ValueError as error:
        raise UserError(
            f"{where} cannot be used ({error}): correct the template or leave the row out"
        ) from error
    yield Piece("", ids=ids, scored=scored)


def _rows(source: Path | str, reading: Reading) -> Iterator[Mapping[str, Any]]:
    """The rows of a table or dataset, which is not loaded as a whole; a text is one row."""
    options: dict[str, Any] = {"path": source, "name": reading.subset, "split": reading.split}
    if isinstance(source, Path):
        kind = TABLES.get(source.suffix.lower())
        if kind is None:
            yield {reading.text_column: read_text(source)[0]}
            return
        options = {"path": kind, "data_files": str(source), "split": "train"}
    require("datasets", f"{source} (a table or dataset)")
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield from datasets.load_dataset(**options, streaming=True)
    except Exception as error:  # of datasets or pyarrow, of many kinds
        raise UserError(
            f"{source} cannot be read ({one_line(error)}): write the file again, or check the "
            "name, split and subset of the dataset, and the network"
        ) from error
