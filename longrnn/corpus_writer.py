"""Writes the four files of a corpus (see `longrnn.corpus`), renamed into place as a whole."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from longrnn.corpus import (
    BLOCKS,
    DOCUMENTS,
    FORMAT,
    HEADER,
    OWN,
    TOKENS,
    Corpus,
    Header,
    digest,
    little,
    write_blocks,
)
from longrnn.errors import UserError
from longrnn.files import leftovers, sha256, sync_folder, write_atomic
from longrnn.locks import Lock
from longrnn.text import Tokenizer


class CorpusWriter:
    """Writes a corpus beside its folder, and renames it into place when it is complete.

    A context manager; after an error nothing is left behind.

    Args:
        folder: the corpus folder, which must not exist.
        tokenizer: makes the ids.
        name: the name by which `load_tokenizer` finds the tokenizer.
        min_length: documents of fewer tokens are dropped and counted.

    Raises:
        UserError: on entering, where the folder exists or another process builds it.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, name: str, min_length: int) -> None:
        self.folder = folder
        self._lock = Lock.of_file(folder, instead="choose another --out")
        self.tokenizer, self.name, self.min_length = tokenizer, name, min_length
        self.vocab_size = tokenizer.vocab_size
        self.dtype = "uint16" if self.vocab_size <= 2**16 else "uint32"
        self.tokens = self.documents = self.dropped_tokens = self.dropped_documents = 0
        self._open = 0  # tokens of the document that is being written
        self._beside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")

    def __enter__(self) -> Self:
        self._lock.acquire()
        try:
            if self.folder.exists():
                raise UserError(
                    f"{self.folder} exists and is not overwritten: choose another --out"
                )
            for unfinished in leftovers(self.folder):  # of builds that were killed
                shutil.rmtree(unfinished)
            self._beside.mkdir()
        except BaseException:
            self._lock.release()
            raise
        self._tokens = open(self._beside / TOKENS, "wb")
        self._ends = open(self._beside / DOCUMENTS, "wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._tokens.close()
            self._ends.close()
        finally:
            if self._beside.exists():
                shutil.rmtree(self._beside)
            self._lock.release()

    def write(self, ids: Sequence[int]) -> None:
        """Adds tokens to the current document.

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
        self._tokens.write(wide.astype(little(self.dtype)).tobytes())
        self._open += wide.size

    def end_document(self) -> None:
        """Ends the current document, which is dropped if it is too short."""
        if self._open and self._open >= self.min_length:
            self.tokens += self._open
            self.documents += 1
            self._ends.write(self.tokens.to_bytes(8, "little"))
        elif self._open:
            self.dropped_documents += 1
            self.dropped_tokens += self._open
            self._tokens.seek(self.tokens * np.dtype(self.dtype).itemsize)
            self._tokens.truncate()
        self._open = 0

    def publish(self, sources: list[str]) -> Header:
        """Completes the corpus and renames it into place.

        Raises:
            UserError: there is no document.
        """
        if not self.documents:
            raise UserError(
                f"no document has {max(1, self.min_length)} tokens or more "
                f"({self.dropped_documents:,} shorter ones were dropped): give other files or a "
                "smaller --min-length"
            )
        for file in (self._tokens, self._ends):
            file.flush()
            os.fsync(file.fileno())
        write_blocks(self._beside)
        header = Header(
            tokenizer=self.name,
            fingerprint=self.tokenizer.fingerprint(),
            vocab_size=self.vocab_size,
            dtype=self.dtype,
            documents=self.documents,
            tokens=self.tokens,
            min_length=self.min_length,
            dropped_documents=self.dropped_documents,
            dropped_tokens=self.dropped_tokens,
            sources=sources,
            sha256={name: sha256(self._beside / name) for name in (TOKENS, DOCUMENTS, BLOCKS)},
        )
        content = {"format": FORMAT, **asdict(header)}
        text = json.dumps({**content, OWN: digest(content)}, indent=2) + "\n"
        write_atomic(self._beside / HEADER, text)
        Corpus(self._beside)  # verifies it: a corpus that cannot be read is not published
        os.rename(self._beside, self.folder)
        sync_folder(self.folder.parent)
        return header
