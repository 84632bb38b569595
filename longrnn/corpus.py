"""Corpora: token ids of documents in files that are mapped into memory and never read whole.

A corpus is a folder of four files: `tokens.bin` (the ids of all documents, one after the other,
little-endian uint16 or uint32), `documents.bin` (where each document ends, uint64), `blocks.bin`
(the SHA-256 of each BLOCK bytes of `tokens.bin`) and `corpus.json` (the tokenizer, counts and the
checksums of these files and of itself).

Opening a corpus verifies all files but `tokens.bin`, whose blocks are verified when they are first
read: the start of a training does not wait for a whole corpus to be read, and no token that was not
verified is trained on.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.files import leftovers, replacing, sha256, sync_folder, write_atomic
from longrnn.locks import Lock
from longrnn.text import Tokenizer

# What is written, and what versions that did not verify blocks wrote.
FORMAT, WITHOUT_BLOCKS = "longrnn-corpus-2", "longrnn-corpus-1"
HEADER, TOKENS, DOCUMENTS, BLOCKS = "corpus.json", "tokens.bin", "documents.bin", "blocks.bin"
# Bytes of `tokens.bin` that one checksum is for, and bytes of that.
BLOCK, DIGEST = 2**18, 32
# The key of the header's checksum of itself.
OWN = "header_sha256"
BUILD = "build it again with `longrnn data build`"


@dataclass
class Header:
    """What `corpus.json` says.

    Attributes:
        tokenizer: the name that it was given by.
        fingerprint: of the tokenizer, see `longrnn.text.Tokenizer`.
        vocab_size: ids that the tokenizer has.
        dtype: of `tokens.bin`: `uint16`, or `uint32` for more than 65,536 ids.
        documents: how many there are.
        tokens: how many there are.
        min_length: shorter documents were dropped.
        dropped_documents: how many were.
        dropped_tokens: how many tokens they had.
        sources: the files that the documents came from.
        sha256: of the other files, hexadecimal, by name.
    """

    tokenizer: str
    fingerprint: str
    vocab_size: int
    dtype: str
    documents: int
    tokens: int
    min_length: int
    dropped_documents: int
    dropped_tokens: int
    sources: list[str]
    sha256: dict[str, str]


class Corpus:
    """The documents of a corpus folder.

    Args:
        folder: what `longrnn data build` wrote.

    Attributes:
        header: see `Header`.
        lengths: `(documents,)` int64, tokens of every document.
        sha256: of all documents, as it was when they were written.

    Raises:
        UserError: a folder that is missing, incomplete, truncated or of another kind.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.header = _read_header(folder / HEADER)
        # Not of the blocks: the same documents are the same data in either format.
        documents = {name: self.header.sha256[name] for name in (TOKENS, DOCUMENTS)}
        self.sha256 = _digest(documents)
        self._itemsize = np.dtype(self.header.dtype).itemsize
        sizes = {TOKENS: self.header.tokens * self._itemsize, DOCUMENTS: self.header.documents * 8}
        if BLOCKS in self.header.sha256:
            sizes[BLOCKS] = -(-sizes[TOKENS] // BLOCK) * DIGEST
        for name, wanted in sizes.items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else 0
            if found != wanted:
                raise UserError(
                    f"{path} has {found:,} bytes and corpus.json says {wanted:,}: it is truncated, "
                    f"copy the folder again or {BUILD}"
                )
        self._tokens = np.memmap(folder / TOKENS, _little(self.header.dtype), mode="r")
        ends = np.fromfile(folder / DOCUMENTS, "<u8").astype(np.int64)
        self._starts = np.concatenate([[0], ends[:-1]])
        self.lengths = ends - self._starts
        if (self.lengths < 1).any() or ends[-1] != self.header.tokens:
            raise UserError(f"{folder / DOCUMENTS} is damaged: {BUILD}")
        for name in sizes.keys() - {TOKENS}:
            self._verify(name)
        self._blocks: bytes | None = None
        if BLOCKS in sizes:
            self._blocks = (folder / BLOCKS).read_bytes()
        self._verified = bytearray(len(self._blocks or b"") // DIGEST)  # 1 for a block that fits

    def read(self, document: int, start: int, stop: int) -> Tensor:
        """Tokens `start` up to `stop` of a document, `(stop − start,)` int64.

        Raises:
            UserError: the tokens are damaged, or an id that the tokenizer does not have.
        """
        first = int(self._starts[document])
        self._verify_blocks(first + start, first + stop)
        ids = self._tokens[first + start : first + stop].astype(np.int64)
        if ids.size and ids.max() >= self.header.vocab_size:
            raise UserError(
                f"{self.folder / TOKENS} has token id {ids.max()} and its tokenizer has "
                f"{self.header.vocab_size}: it is damaged, {BUILD}"
            )
        return torch.from_numpy(ids)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuses a tokenizer that did not make this corpus."""
        if tokenizer.fingerprint() != self.header.fingerprint:
            raise UserError(
                f"{self.folder} was made with the tokenizer {self.header.tokenizer!r} "
                f"({self.header.fingerprint}) and this one is {tokenizer.fingerprint()}: set "
                f"tokenizer={self.header.tokenizer}, or {BUILD}"
            )

    def verify(self) -> None:
        """Reads both files whole and compares their checksums.

        Raises:
            UserError: a file that has changed since it was written.
        """
        for name in self.header.sha256:
            self._verify(name)

    def _verify(self, name: str) -> None:
        if sha256(self.folder / name) != self.header.sha256[name]:
            raise UserError(
                f"{self.folder / name} is damaged, it has changed since it was built: copy the "
                f"folder again or {BUILD}"
            )

    def _verify_blocks(self, start: int, stop: int) -> None:
        """Compares the blocks of tokens `start` up to `stop` that were not read before."""
        if self._blocks is None or start >= stop:
            return
        raw = self._tokens.view(np.uint8)
        last = (stop * self._itemsize - 1) // BLOCK
        for block in range(start * self._itemsize // BLOCK, last + 1):
            if self._verified[block]:
                continue
            found = hashlib.sha256(raw[block * BLOCK : (block + 1) * BLOCK].tobytes()).digest()
            if found != self._blocks[block * DIGEST : (block + 1) * DIGEST]:
                raise UserError(
                    f"{self.folder / TOKENS} is damaged (bytes {block * BLOCK:,} to "
                    f"{(block + 1) * BLOCK:,}): copy the folder again or {BUILD}"
                )
            self._verified[block] = 1


class CorpusWriter:
    """Writes a corpus beside its folder, and renames it into place when all is written.

    A context manager: a block that ends with an error leaves nothing behind.

    Args:
        folder: of the corpus, which must not exist.
        tokenizer: that makes the ids.
        name: what `load_tokenizer` finds the tokenizer by.
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
        """Adds tokens to the document at hand.

        Raises:
            UserError: an id outside the vocabulary.
        """
        wide = np.asarray(ids, dtype=np.int64)
        if wide.size and not 0 <= wide.min() <= wide.max() < self.vocab_size:
            bad = wide.min() if wide.min() < 0 else wide.max()
            raise UserError(
                f"the tokenizer {self.name!r} gave the id {bad} and says that it has "
                f"{self.vocab_size}: use another tokenizer"
            )
        self._tokens.write(wide.astype(_little(self.dtype)).tobytes())
        self._open += wide.size

    def end_document(self) -> None:
        """Ends the document at hand, which is dropped where it is too short."""
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
        """Makes what was written the corpus.

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
        _write_blocks(self._beside)
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
        text = json.dumps({**content, OWN: _digest(content)}, indent=2) + "\n"
        write_atomic(self._beside / HEADER, text)
        Corpus(self._beside)  # what no reader would accept is not published
        os.rename(self._beside, self.folder)
        sync_folder(self.folder.parent)
        return header


def _write_blocks(folder: Path) -> None:
    """Writes the checksums of the blocks of `tokens.bin`."""
    with open(folder / TOKENS, "rb") as tokens, replacing(folder / BLOCKS) as blocks:
        while block := tokens.read(BLOCK):
            blocks.write(hashlib.sha256(block).digest())


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _little(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _read_header(path: Path) -> Header:
    if not path.is_file():
        raise UserError(
            f"no corpus at {path.parent} (it has no {HEADER}): make one with `longrnn data build`"
        )
    try:
        content = json.loads(path.read_text())
        recorded = content.pop(OWN, None)
        digest = _digest(content)
        form = content.pop("format")
        if form not in (FORMAT, WITHOUT_BLOCKS):
            raise UserError(f"{path} is of another version of longrnn: {BUILD}")
        if form == FORMAT and recorded != digest:
            raise ValueError("its checksum does not fit")
        header = Header(**content)
        counts = (header.vocab_size, header.documents, header.tokens)
        if not {TOKENS, DOCUMENTS} <= header.sha256.keys():
            raise ValueError("checksums are missing")
        if header.dtype not in ("uint16", "uint32") or min(counts) < 1:
            raise ValueError("numbers out of range")
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}): {BUILD}") from error
    return header
