"""Writes the files of a corpus (see `longrnn.corpus`), renamed into place as a whole.

While it is written, a corpus is in a folder beside its place. Now and then its progress is recorded
there, so that a build that was interrupted or killed continues from the last record.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from longrnn import corpus_columns
from longrnn.corpus import (
    BLOCKS,
    DOCUMENTS,
    HEADER,
    SCORED_BLOCKS,
    Corpus,
    Header,
    header_text,
)
from longrnn.corpus_columns import ColumnWriter, write_blocks
from longrnn.errors import UserError
from longrnn.files import leftovers, sha256, sync_folder, write_atomic
from longrnn.locks import Lock
from longrnn.text import Tokenizer

PROGRESS = "progress.json"
# Seconds between two records of the progress.
RECORD_EVERY = 5.0


@dataclass
class Written:
    """What a corpus holds so far.

    Attributes:
        documents, tokens: complete and kept.
        dropped_documents, dropped_tokens: too short.
        ended: documents that ended, the empty ones included.
        open: tokens in the files that belong to the unfinished document.
        scored_tokens: tokens of answers among `tokens`.
        source, items: how many sources were read, and how many items of the next one.
    """

    documents: int = 0
    tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    ended: int = 0
    open: int = 0
    scored_tokens: int = 0
    source: int = 0
    items: int = 0


class CorpusWriter:
    """Writes a corpus beside its folder, and renames it into place when it is complete.

    A context manager. After a `UserError` nothing is left behind; after any other interruption the
    progress stays, if some was recorded, and the same build continues from there.

    Args:
        folder: the corpus folder, which must not exist.
        tokenizer: makes the ids.
        name: the name by which `load_tokenizer` finds the tokenizer.
        min_length: documents of fewer tokens are dropped and counted.
        scored: whether it has answers, see `longrnn.corpus`.
        identity: of everything that determines the content; a build continues only one of the same
            identity. None for one that cannot be continued.

    Attributes:
        written: the progress; `source` and `items` are kept by the caller.

    Raises:
        UserError: on entering, where the folder exists or another process builds it.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        name: str,
        min_length: int,
        scored: bool = False,
        identity: str | None = None,
    ) -> None:
        self.folder = folder
        self._lock = Lock.of_file(folder, instead="choose another --out")
        self.tokenizer, self.name, self.min_length = tokenizer, name, min_length
        self.vocab_size = tokenizer.vocab_size
        self.dtype = "uint16" if self.vocab_size <= 2**16 else "uint32"
        self.written = Written()
        self._scored, self._identity = scored, identity
        self._held: list[tuple[NDArray[np.int64], NDArray[np.bool_]]] = []  # of a short document
        self._beside = folder.with_name(f".{folder.name}.partial")
        self._recorded = time.monotonic()

    def __enter__(self) -> Self:
        self._lock.acquire()
        try:
            if self.folder.exists():
                raise UserError(
                    f"{self.folder} exists and is not overwritten: choose another --out"
                )
            for unfinished in leftovers(self.folder):  # of builds of earlier versions
                shutil.rmtree(unfinished)
            self.written = self._found() or Written()
            if not self.written.ended and not self.written.open:
                shutil.rmtree(self._beside, ignore_errors=True)
            self._beside.mkdir(exist_ok=True)
        except BaseException:
            self._lock.release()
            raise
        done = self.written.tokens + self.written.open
        shard = corpus_columns.SHARD
        self._columns = {"tokens": ColumnWriter(self._beside, "tokens", self.dtype, shard, done)}
        if self._scored:
            self._columns["scored"] = ColumnWriter(self._beside, "scored", "uint8", shard, done)
        ends = self._beside / DOCUMENTS
        self._ends = open(ends, "r+b" if ends.exists() else "w+b")
        self._ends.truncate(self.written.documents * 8)
        self._ends.seek(0, os.SEEK_END)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for column in self._columns.values():
                column.close()
            self._ends.close()
        finally:
            stays = error is not None and not isinstance(error, UserError)
            if self._beside.exists() and not (stays and (self._beside / PROGRESS).exists()):
                shutil.rmtree(self._beside)
            self._lock.release()

    def write(self, ids: Sequence[int], scored: Sequence[bool] | None = None) -> None:
        """Adds tokens to the current document; `scored` tells which belong to answers.

        Raises:
            UserError: an id outside the vocabulary.
        """
        wide = np.asarray(ids, dtype=np.int64)
        if wide.size and not 0 <= wide.min() <= wide.max() < self.vocab_size:
            bad = wide.min() if wide.min() < 0 else wide.max()
            raise UserError(
                f"the tokenizer {self.name!r} gave the id {bad} and has only "
                f"{self.vocab_size}: use another tokenizer"
            )
        marks = np.zeros(len(wide), bool) if scored is None else np.asarray(scored, bool)
        self._held.append((wide, marks))
        if self.open_tokens() >= self.min_length:
            self._flush()

    def open_tokens(self) -> int:
        """Tokens of the current document."""
        return self.written.open + sum(len(ids) for ids, _ in self._held)

    def end_document(self) -> None:
        """Ends the current document, which is dropped if it is too short."""
        written, length = self.written, self.open_tokens()
        if length and length >= self.min_length:
            self._flush()
            written.tokens += length
            written.documents += 1
            self._ends.write(written.tokens.to_bytes(8, "little"))
            written.ended += 1
        elif length:
            self.drop(length)
        else:
            written.ended += 1
        self._held.clear()
        written.open = 0

    def drop(self, tokens: int) -> None:
        """Counts a document of so many tokens that is not written."""
        self.written.dropped_documents += 1
        self.written.dropped_tokens += tokens
        self.written.ended += 1

    def record(self, *, every: float | None = None) -> None:
        """Records the progress, if so many seconds (by default RECORD_EVERY) have passed.

        Nothing is recorded while a document is short enough to be dropped.
        """
        now = time.monotonic()
        every = RECORD_EVERY if every is None else every
        if self._identity is None or self._held or now - self._recorded < every:
            return
        self._recorded = now
        self._sync()
        content = {"identity": self._identity, **asdict(self.written)}
        write_atomic(self._beside / PROGRESS, json.dumps(content))

    def publish(self, sources: list[str]) -> Header:
        """Completes the corpus and renames it into place.

        Raises:
            UserError: there is no document.
        """
        written = self.written
        if not written.documents:
            raise UserError(
                f"no document has {max(1, self.min_length)} tokens or more "
                f"({written.dropped_documents:,} shorter ones were dropped): give other files or a "
                "smaller --min-length"
            )
        self._sync()
        header = Header(
            tokenizer=self.name,
            fingerprint=self.tokenizer.fingerprint(),
            vocab_size=self.vocab_size,
            dtype=self.dtype,
            documents=written.documents,
            tokens=written.tokens,
            min_length=self.min_length,
            dropped_documents=written.dropped_documents,
            dropped_tokens=written.dropped_tokens,
            sources=sources,
            sha256={},
            shard=corpus_columns.SHARD,
            scored_tokens=written.scored_tokens if self._scored else None,
            identity=self._identity,
        )
        blocks = {"tokens": BLOCKS, "scored": SCORED_BLOCKS}
        names = [DOCUMENTS]
        for stem, files in header.columns().items():
            write_blocks(self._beside, [*files], blocks[stem])
            names += [*files, blocks[stem]]
        header.sha256 = {name: sha256(self._beside / name) for name in names}
        write_atomic(self._beside / HEADER, header_text(header))
        (self._beside / PROGRESS).unlink(missing_ok=True)
        Corpus(self._beside)  # verifies it: a corpus that cannot be read is not published
        os.rename(self._beside, self.folder)
        sync_folder(self.folder.parent)
        return header

    def _flush(self) -> None:
        """Moves what is held into the files."""
        for ids, marks in self._held:
            self._columns["tokens"].write(ids)
            if self._scored:
                self._columns["scored"].write(marks)
            self.written.open += len(ids)
            self.written.scored_tokens += int(marks.sum())
        self._held.clear()

    def _sync(self) -> None:
        for column in self._columns.values():
            column.sync()
        self._ends.flush()
        os.fsync(self._ends.fileno())

    def _found(self) -> Written | None:
        """The recorded progress of the same build; None where there is none."""
        try:
            content = json.loads((self._beside / PROGRESS).read_text())
            if content.pop("identity") != self._identity or self._identity is None:
                return None
            if content.keys() != {field.name for field in fields(Written)}:
                return None
            return Written(**content)
        except (OSError, ValueError, KeyError, AttributeError):
            return None  # a build of another version, or a damaged record: it starts again
