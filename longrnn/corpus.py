"""Corpora: token ids of documents in memory-mapped files that are never loaded as a whole.

A corpus is a folder of four files: `tokens.bin` (the ids of all documents, one after the other,
little-endian uint16 or uint32), `documents.bin` (where each document ends, uint64), `blocks.bin`
(the SHA-256 of each BLOCK bytes of `tokens.bin`) and `corpus.json` (the tokenizer, counts and the
checksums of these files and of itself).

Opening a corpus verifies all files but `tokens.bin`, whose blocks are verified when they are first
read: training starts without reading the whole corpus, and never uses an unverified token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.files import replacing, sha256
from longrnn.text import Tokenizer

# The current format, and that of versions without checksums of blocks.
FORMAT, WITHOUT_BLOCKS = "longrnn-corpus-2", "longrnn-corpus-1"
HEADER, TOKENS, DOCUMENTS, BLOCKS = "corpus.json", "tokens.bin", "documents.bin", "blocks.bin"
# Bytes of `tokens.bin` per checksum, and bytes of a checksum.
BLOCK, DIGEST = 2**18, 32
# The key of the header's own checksum.
OWN = "header_sha256"
BUILD = "build it again with `longrnn data build`"


@dataclass
class Header:
    """The content of `corpus.json`.

    Attributes:
        tokenizer: its name, as given by the user.
        fingerprint: of the tokenizer, see `longrnn.text.Tokenizer`.
        vocab_size: number of ids of the tokenizer.
        dtype: of `tokens.bin`: `uint16`, or `uint32` for more than 65,536 ids.
        documents: number of documents.
        tokens: number of tokens.
        min_length: documents of fewer tokens were dropped.
        dropped_documents: number of dropped documents.
        dropped_tokens: number of their tokens.
        sources: the files that the documents came from.
        sha256: hexadecimal checksums of the other files, by name.
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
        folder: a folder that `longrnn data build` wrote.

    Attributes:
        header: see `Header`.
        lengths: `(documents,)` int64, tokens of every document.
        sha256: checksum of all documents, recorded when they were written.

    Raises:
        UserError: the folder is missing, incomplete, truncated or not a corpus.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.header = _read_header(folder / HEADER)
        # Without the blocks, so that the same documents have the same hash in both formats.
        documents = {name: self.header.sha256[name] for name in (TOKENS, DOCUMENTS)}
        self.sha256 = digest(documents)
        self._itemsize = np.dtype(self.header.dtype).itemsize
        sizes = {TOKENS: self.header.tokens * self._itemsize, DOCUMENTS: self.header.documents * 8}
        if BLOCKS in self.header.sha256:
            sizes[BLOCKS] = -(-sizes[TOKENS] // BLOCK) * DIGEST
        for name, wanted in sizes.items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else 0
            if found != wanted:
                raise UserError(
                    f"{path} has {found:,} bytes and not {wanted:,} as in corpus.json: it is "
                    f"truncated, copy the folder again or {BUILD}"
                )
        self._tokens = np.memmap(folder / TOKENS, little(self.header.dtype), mode="r")
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
        self._verified = bytearray(len(self._blocks or b"") // DIGEST)  # 1 for a verified block

    def read(self, document: int, start: int, stop: int) -> Tensor:
        """Tokens `start` up to `stop` of a document, `(stop − start,)` int64.

        Raises:
            UserError: the tokens are damaged, or hold an id that the tokenizer does not have.
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
        """Raises UserError for a tokenizer other than the one that made this corpus."""
        if tokenizer.fingerprint() != self.header.fingerprint:
            raise UserError(
                f"{self.folder} was made with the tokenizer {self.header.tokenizer!r} "
                f"({self.header.fingerprint}) and this one is {tokenizer.fingerprint()}: set "
                f"tokenizer={self.header.tokenizer}, or {BUILD}"
            )

    def verify(self) -> None:
        """Reads all files and compares their checksums.

        Raises:
            UserError: a file has changed since it was written.
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
        """Verifies the blocks of tokens `start` up to `stop` that were not verified before."""
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


def write_blocks(folder: Path) -> None:
    """Writes the checksums of the blocks of `tokens.bin`."""
    with open(folder / TOKENS, "rb") as tokens, replacing(folder / BLOCKS) as blocks:
        while block := tokens.read(BLOCK):
            blocks.write(hashlib.sha256(block).digest())


def digest(content: Mapping[str, Any]) -> str:
    """Hexadecimal SHA-256 of a mapping as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def little(dtype: str) -> np.dtype[Any]:
    """The little-endian form of a dtype, in which token ids are stored."""
    return np.dtype(dtype).newbyteorder("<")


def _read_header(path: Path) -> Header:
    if not path.is_file():
        raise UserError(
            f"no corpus at {path.parent} (it has no {HEADER}): make one with `longrnn data build`"
        )
    try:
        content = json.loads(path.read_text())
        recorded = content.pop(OWN, None)
        expected = digest(content)
        form = content.pop("format")
        if form not in (FORMAT, WITHOUT_BLOCKS):
            raise UserError(f"{path} was written by another version of longrnn: {BUILD}")
        if form == FORMAT and recorded != expected:
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
