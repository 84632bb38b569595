"""Corpora: token ids of documents in memory-mapped files that are never loaded as a whole.

A corpus is a folder: `tokens.bin`, `tokens.1.bin`, … (the ids of all documents, one after the
other, little-endian uint16 or uint32), `documents.bin` (where each document ends, uint64),
`blocks.bin` (the SHA-256 of each BLOCK bytes of the tokens) and `corpus.json` (the tokenizer,
counts and the checksums of these files and of itself). A corpus of prompts and answers also has
`scored.bin` (uint8, 1 for a token of an answer) and `scored_blocks.bin`.

Opening a corpus verifies all files but the tokens and `scored.bin`, whose blocks are verified when
they are first read: training starts without reading the whole corpus, and never uses an unverified
token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longrnn import corpus_columns
from longrnn.corpus_columns import BUILD, DIGEST, Column, file_sizes
from longrnn.errors import UserError
from longrnn.files import sha256
from longrnn.text import Tokenizer

# The current format, that of versions without shards, and that without checksums of blocks.
FORMAT, FORMER, WITHOUT_BLOCKS = "longrnn-corpus-3", "longrnn-corpus-2", "longrnn-corpus-1"
HEADER, TOKENS, DOCUMENTS, BLOCKS = "corpus.json", "tokens.bin", "documents.bin", "blocks.bin"
SCORED, SCORED_BLOCKS = "scored.bin", "scored_blocks.bin"
# The key of the header's own checksum.
OWN = "header_sha256"


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
        shard: bytes of every file of a column but the last; 0 for one file of any size.
        scored_tokens: number of tokens of answers; None for a corpus without `scored.bin`.
        identity: hash of what determined the content; None where it was not given.
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
    shard: int = 0
    scored_tokens: int | None = None
    identity: str | None = None

    def columns(self) -> dict[str, dict[str, int]]:
        """The files of each column and their bytes, by the stem of their names."""
        stems = {"tokens": self.tokens * np.dtype(self.dtype).itemsize}
        if self.scored_tokens is not None:
            stems["scored"] = self.tokens
        return {stem: file_sizes(stem, size, self.shard) for stem, size in stems.items()}


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
        self.header = read_header(folder / HEADER)
        columns = self.header.columns()
        files = {name: size for column in columns.values() for name, size in column.items()}
        sizes = {**files, DOCUMENTS: self.header.documents * 8}
        # Without the blocks, so that the same documents have the same hash in all formats.
        self.sha256 = digest({name: self.header.sha256[name] for name in sizes})
        for stem, name in (("tokens", BLOCKS), ("scored", SCORED_BLOCKS)):
            if name in self.header.sha256:
                size = sum(columns[stem].values())
                sizes[name] = -(-size // corpus_columns.BLOCK) * DIGEST
        for name, wanted in sizes.items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else 0
            if found != wanted:
                raise UserError(
                    f"{path} has {found:,} bytes and not {wanted:,} as in corpus.json: it is "
                    f"truncated, copy the folder again or {BUILD}"
                )
        self._ends = np.memmap(folder / DOCUMENTS, "<u8", mode="r")
        self.lengths = np.diff(np.asarray(self._ends), prepend=np.uint64(0)).view(np.int64)
        if (self.lengths < 1).any() or self._ends[-1] != self.header.tokens:
            raise UserError(f"{folder / DOCUMENTS} is damaged: {BUILD}")
        for name in sizes.keys() - files.keys():
            self._verify(name)
        self._tokens = self._column("tokens", self.header.dtype, BLOCKS)
        scored = self.header.scored_tokens is not None
        self._scored = self._column("scored", "uint8", SCORED_BLOCKS) if scored else None

    def _column(self, stem: str, dtype: str, blocks: str) -> Column:
        size = sum(self.header.columns()[stem].values())
        known = (self.folder / blocks).read_bytes() if blocks in self.header.sha256 else None
        shard = self.header.shard
        return Column(self.folder, stem, dtype, size=size, shard=shard, blocks=known)

    def read(self, document: int, start: int, stop: int) -> Tensor:
        """Tokens `start` up to `stop` of a document, `(stop − start,)` int64.

        Raises:
            UserError: the tokens are damaged, or hold an id that the tokenizer does not have.
        """
        first = self._first(document)
        ids = self._tokens.read(first + start, first + stop).astype(np.int64)
        if ids.size and ids.max() >= self.header.vocab_size:
            raise UserError(
                f"{self.folder / TOKENS} has token id {ids.max()} and its tokenizer has "
                f"{self.header.vocab_size}: it is damaged, {BUILD}"
            )
        return torch.from_numpy(ids)

    def read_scored(self, document: int, start: int, stop: int) -> Tensor:
        """Which of the tokens `start` up to `stop` of a document belong to answers, bool.

        Raises:
            UserError: the corpus has no answers, or is damaged.
        """
        if self._scored is None:
            raise UserError(
                f"{self.folder} holds texts without prompts and answers: build it with "
                "`longrnn data build --instruct`, or train on it with task.kind=text"
            )
        first = self._first(document)
        return torch.from_numpy(self._scored.read(first + start, first + stop) == 1)

    @property
    def scored_tokens(self) -> int:
        """Tokens of answers; 0 for texts without prompts and answers."""
        return self.header.scored_tokens or 0

    def _first(self, document: int) -> int:
        """The index of the first token of a document in the corpus."""
        return int(self._ends[document - 1]) if document else 0

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


def digest(content: Mapping[str, Any]) -> str:
    """Hexadecimal SHA-256 of a mapping as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def header_text(header: Header) -> str:
    """The content of `corpus.json`."""
    content = {"format": FORMAT, **asdict(header)}
    return json.dumps({**content, OWN: digest(content)}, indent=2) + "\n"


def read_header(path: Path) -> Header:
    """Reads a `corpus.json`.

    Raises:
        UserError: it is missing or damaged.
    """
    if not path.is_file():
        raise UserError(
            f"no corpus at {path.parent} (it has no {HEADER}): make one with `longrnn data build`"
        )
    try:
        content = json.loads(path.read_text())
        recorded = content.pop(OWN, None)
        expected = digest(content)
        form = content.pop("format")
        if form not in (FORMAT, FORMER, WITHOUT_BLOCKS):
            raise UserError(f"{path} was written by another version of longrnn: {BUILD}")
        if recorded != expected and not (form == WITHOUT_BLOCKS and recorded is None):
            raise ValueError("its checksum does not fit")
        header = Header(**content)
        counts = (header.vocab_size, header.documents, header.tokens)
        if header.dtype not in ("uint16", "uint32") or min(counts) < 1 or header.shard < 0:
            raise ValueError("numbers out of range")
        files = {name for column in header.columns().values() for name in column}
        if not {DOCUMENTS, *files} <= header.sha256.keys():
            raise ValueError("checksums are missing")
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}): {BUILD}") from error
    return header
