"""Token files: what is written is what is read, and nothing else is accepted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from longrnn.corpus import Corpus, CorpusWriter, Header
from longrnn.errors import UserError
from longrnn.text import ByteTokenizer


class Wide(ByteTokenizer):
    """More ids than 16 bits have."""

    vocab_size = 70_000

    def fingerprint(self) -> str:
        return "wide"


def build(
    folder: Path, documents: list[list[int]], *, wide: bool = False, min_length: int = 2
) -> Header:
    tokenizer = Wide() if wide else ByteTokenizer()
    with CorpusWriter(folder, tokenizer, name="bytes", min_length=min_length) as writer:
        for ids in documents:
            writer.write(ids[:2])  # a document may come in pieces, and empty ones
            writer.write([])
            writer.write(ids[2:])
            writer.end_document()
        return writer.publish(["somewhere"])


@pytest.mark.parametrize("wide", [False, True])
def test_documents_come_back(tmp_path: Path, wide: bool) -> None:
    """Ids cut to 16 bits, or documents that begin one token late."""
    documents = [[1, 2, 3], [69_999 if wide else 255, 0], list(range(100))]
    build(tmp_path / "c", documents, wide=wide)
    corpus = Corpus(tmp_path / "c")
    assert corpus.header.dtype == ("uint32" if wide else "uint16")
    assert corpus.lengths.tolist() == [3, 2, 100]
    for index, ids in enumerate(documents):
        read = corpus.read(index, 0, len(ids))
        assert read.tolist() == ids
        assert str(read.dtype) == "torch.int64"
    assert corpus.read(2, 98, 99).tolist() == [98]
    corpus.verify()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_short_documents_are_dropped_and_counted(tmp_path: Path) -> None:
    """Tokens of a dropped document that stay behind in the file; empty ones are no documents."""
    documents = [[9], [1, 2, 3, 4, 5], [], [7, 8, 9], [1, 1, 1, 1], [5, 5]]
    header = build(tmp_path / "c", documents, min_length=4)
    assert (header.documents, header.tokens) == (2, 9)
    assert (header.dropped_documents, header.dropped_tokens) == (3, 6)
    corpus = Corpus(tmp_path / "c")
    assert corpus.read(0, 0, 5).tolist() == [1, 2, 3, 4, 5]
    assert corpus.read(1, 0, 4).tolist() == [1, 1, 1, 1]


def test_nothing_is_overwritten_and_nothing_left_behind(tmp_path: Path) -> None:
    """Half a corpus after an error, or a good one that is lost; what a kill left is removed."""
    folder = tmp_path / "c"
    with pytest.raises(UserError, match="no document has 2 tokens or more"):
        build(folder, [[1]])
    with pytest.raises(UserError, match="gave the id 256 and says that it has 256"):
        build(folder, [[1, 2], [3, 256]])
    with pytest.raises(UserError, match="gave the id -1"):
        build(folder, [[1, -1]])
    assert not list(tmp_path.iterdir())
    (tmp_path / ".c.0a1b2c3d").mkdir()
    (tmp_path / ".c.0a1b2c3d/tokens.bin").write_bytes(b"half")
    build(folder, [[1, 2]])
    with pytest.raises(UserError, match="exists and is not overwritten"):
        build(folder, [[3, 4]])
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert Corpus(folder).read(0, 0, 2).tolist() == [1, 2]


def change(folder: Path, **changes: object) -> None:
    header = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps({**header, **changes}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def unordered(folder: Path) -> None:
    np.array([5, 3], "<u8").tofile(folder / "documents.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: truncate(c / "tokens.bin"), "tokens.bin has 9 bytes.*says 10.*truncated"),
        (lambda c: truncate(c / "documents.bin"), "documents.bin has 15 bytes.*truncated"),
        (lambda c: (c / "tokens.bin").unlink(), "tokens.bin has 0 bytes"),
        (lambda c: (c / "corpus.json").unlink(), "no corpus at .*longrnn data build"),
        (lambda c: (c / "corpus.json").write_text("{"), "corpus.json is damaged"),
        (lambda c: (c / "corpus.json").write_text("[]"), "corpus.json is damaged"),
        (lambda c: change(c, format="longrnn-corpus-9"), "another version"),
        (lambda c: change(c, dtype="float64"), "corpus.json is damaged"),
        (lambda c: change(c, documents="2"), "corpus.json is damaged"),
        (lambda c: change(c, documents=0), "corpus.json is damaged"),
        (lambda c: change(c, surprise=1), "corpus.json is damaged"),
        (unordered, "documents.bin is damaged"),
        (shutil.rmtree, "no corpus at"),
    ],
)
def test_a_damaged_corpus_is_refused(tmp_path: Path, damage, message: str) -> None:
    """Text that is not what was tokenised, without a word."""
    build(tmp_path / "c", [[1, 2, 3], [4, 5]])
    damage(tmp_path / "c")
    with pytest.raises(UserError, match=message) as error:
        Corpus(tmp_path / "c")
    assert "\n" not in str(error.value)


def test_ids_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    """A file of the right size with other content."""
    build(tmp_path / "c", [[1, 2, 3], [4, 5]])
    np.array([1, 2, 3, 4, 300], "<u2").tofile(tmp_path / "c/tokens.bin")
    corpus = Corpus(tmp_path / "c")
    assert corpus.read(0, 0, 3).tolist() == [1, 2, 3]
    with pytest.raises(UserError, match="has token id 300 and its tokenizer has 256"):
        corpus.read(1, 0, 2)
    with pytest.raises(UserError, match="tokens.bin has changed since it was built"):
        corpus.verify()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Ids read as something else."""
    build(tmp_path / "c", [[1, 2, 3]])
    corpus = Corpus(tmp_path / "c")
    corpus.check_tokenizer(ByteTokenizer())
    with pytest.raises(UserError, match="made with the tokenizer 'bytes'.*set tokenizer=bytes"):
        corpus.check_tokenizer(Wide())
