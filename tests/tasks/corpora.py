"""Corpora for tests, written without files to read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longrnn.corpus_writer import CorpusWriter
from longrnn.text import ByteTokenizer


def text_corpus(folder: Path, texts: Sequence[str]) -> str:
    """Writes a corpus of texts, one byte per token."""
    with CorpusWriter(folder, ByteTokenizer(), name="bytes", min_length=1) as writer:
        for text in texts:
            writer.write(list(text.encode()))
            writer.end_document()
        writer.publish(["texts"])
    return str(folder)


def instruct_corpus(folder: Path, pairs: Sequence[tuple[str, str]]) -> str:
    """Writes a corpus of prompts with their answers, one byte per token."""
    how = {"name": "bytes", "min_length": 2, "scored": True}
    with CorpusWriter(folder, ByteTokenizer(), **how) as writer:  # type: ignore[arg-type]
        for prompt, answer in pairs:
            ids = [*prompt.encode(), *answer.encode()]
            writer.write(ids, [place >= len(prompt.encode()) for place in range(len(ids))])
            writer.end_document()
        writer.publish(["pairs"])
    return str(folder)
