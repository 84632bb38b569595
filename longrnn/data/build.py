"""Builds corpora, and keeps those of training runs in a cache.

A corpus is written beside its place and renamed when it is complete. A build that was killed starts
again.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np

from longrnn.checksums import write_checksums
from longrnn.data.sources import Source, documents, sources
from longrnn.data.stream import (
    DOCUMENTS,
    HEADER,
    SCORED,
    TOKENS,
    Corpus,
    Header,
    digest,
    read_header,
)
from longrnn.errors import UserError
from longrnn.files import file_name, sync_folder, write_atomic
from longrnn.locks import locked
from longrnn.progress import Progress
from longrnn.text import Reading, Tokenizer

# Changes whenever the files of a corpus do.
FORMAT = "longrnn-corpus-2"


def corpus_of(
    data: str | Sequence[str], reading: Reading, tokenizer: Tokenizer, *, quiet: bool = True
) -> Corpus:
    """The corpus that `data` is, or that is made of it in the cache.

    The cache is `$LONGRNN_CACHE`, or `~/.cache/longrnn`. Later runs on the same files, with the
    same tokenizer and options, find it there.

    Raises:
        UserError: the data is missing or cannot be read.
    """
    listed = [data] if isinstance(data, str) else list(data)
    if len(listed) == 1 and (Path(listed[0]).expanduser() / HEADER).is_file():
        return Corpus(Path(listed[0]).expanduser())
    cache = Path(os.environ.get("LONGRNN_CACHE") or Path.home() / ".cache" / "longrnn")
    identity = _identity(sources(listed), reading, tokenizer)
    folder = cache / "corpora" / file_name(f"{Path(listed[0]).name}-{identity[:16]}")
    if not (folder / HEADER).is_file():
        build(listed, tokenizer, folder, reading=reading, quiet=quiet)
    return Corpus(folder)


def build(
    data: Sequence[str],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    reading: Reading,
    name: str = "",
    quiet: bool = False,
) -> Header:
    """Writes the documents of `data`, in their order, as a corpus.

    Args:
        data: see `longrnn.data.sources`.
        tokenizer: makes the ids.
        folder: where; if it holds a corpus of the same data, options and tokenizer, that stays.
        reading: see `Reading`.
        name: by which `load_tokenizer` finds the tokenizer.
        quiet: print no progress.

    Raises:
        UserError: a source is missing or cannot be read, there is no document, or `folder` holds
            something else. Nothing is left behind.
    """
    if reading.instruct and (reading.split_on is not None or reading.text_column != "text"):
        raise UserError(
            "prompts and answers are read from prompt and completion, or messages: leave out "
            "split_on and text_column"
        )
    found = sources(data)
    identity = _identity(found, reading, tokenizer)
    with locked(folder, instead="choose another --out"):
        if (folder / HEADER).is_file() and read_header(folder).identity == identity:
            return read_header(folder)
        if folder.exists():
            raise UserError(f"{folder} exists and is not overwritten: choose another --out")
        header = Header(
            tokenizer=name,
            fingerprint=tokenizer.fingerprint(),
            vocab_size=tokenizer.vocab_size,
            identity=identity,
            sources=[source.name for source in found],
            scored_tokens=0 if reading.instruct else None,
        )
        beside = folder.with_name(f".{folder.name}.partial")
        if beside.exists():
            print(f"the build of {folder} was interrupted: it starts again", file=sys.stderr)
            shutil.rmtree(beside)
        beside.mkdir(parents=True)
        try:
            _write(header, found, tokenizer, beside, reading, quiet)
            write_atomic(beside / HEADER, json.dumps(asdict(header), indent=2) + "\n")
            write_checksums(beside, ("*",))
            os.rename(beside, folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        sync_folder(folder.parent)
    return header


def _identity(found: Sequence[Source], reading: Reading, tokenizer: Tokenizer) -> str:
    # The fingerprint of a tokenizer covers neither its template nor its end-of-sequence token.
    template = getattr(getattr(tokenizer, "tokenizer", None), "chat_template", None)
    options = reading.model_dump(include=set(Reading.model_fields))
    used = [options, tokenizer.fingerprint(), tokenizer.eos_id, template]
    return digest([FORMAT, [source.identity() for source in found], *used])


def _write(
    header: Header,
    found: Sequence[Source],
    tokenizer: Tokenizer,
    folder: Path,
    reading: Reading,
    quiet: bool,
) -> None:
    """Writes the columns of a corpus, and counts in its header."""
    names = [TOKENS, DOCUMENTS, *([SCORED] if reading.instruct else [])]
    count, most = 0, reading.max_tokens or sys.maxsize
    with (
        ExitStack() as stack,
        Progress("corpus (sources)", len(found), unit="tokens", quiet=quiet) as progress,
    ):
        columns = [stack.enter_context(open(folder / one, "wb")) for one in names]
        for source in found:
            for ids, scored in documents(source, tokenizer, reading):
                if header.tokens >= most:
                    break
                count += 1
                progress.advance(0, len(ids), Path(source.name).name)
                if len(ids) < reading.min_length or (reading.instruct and not scored[1:].any()):
                    header.dropped_documents += 1
                    header.dropped_tokens += len(ids)
                    continue
                header.documents += 1
                header.tokens += len(ids)
                values = (ids.astype(header.dtype), np.array([header.tokens], "<u8"), scored)
                for column, one in zip(columns, values, strict=False):
                    column.write(one.tobytes())
                if header.scored_tokens is not None:
                    header.scored_tokens += int(scored.sum())
            progress.advance(1, 0)
        for column in columns:
            column.flush()
            os.fsync(column.fileno())
    if reading.split_on is not None and count == len(found):
        raise UserError(
            f"{reading.split_on!r} is in none of the files: write what separates their documents "
            r"(a file with the line ends of Windows has \r\n where others have \n)"
        )
    if not header.documents:
        answer = " and an answer" if reading.instruct else ""
        raise UserError(
            f"no document has {reading.min_length} tokens or more{answer} "
            f"({header.dropped_documents:,} were dropped): give other files or a smaller "
            "--min-length"
        )
