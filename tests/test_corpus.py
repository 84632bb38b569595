"""Token files: what is written is what is read, and nothing else is accepted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from longrnn import corpus_columns
from longrnn.corpus import Corpus, Header
from longrnn.corpus_writer import CorpusWriter
from longrnn.errors import UserError
from longrnn.text import ByteTokenizer
from tests.refusals import naming


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
    """Every document is read back exactly, with 16-bit and 32-bit ids."""
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
    """Dropped documents leave no tokens in the file; empty ones are not counted."""
    documents = [[9], [1, 2, 3, 4, 5], [], [7, 8, 9], [1, 1, 1, 1], [5, 5]]
    header = build(tmp_path / "c", documents, min_length=4)
    assert (header.documents, header.tokens) == (2, 9)
    assert (header.dropped_documents, header.dropped_tokens) == (3, 6)
    corpus = Corpus(tmp_path / "c")
    assert corpus.read(0, 0, 5).tolist() == [1, 2, 3, 4, 5]
    assert corpus.read(1, 0, 4).tolist() == [1, 1, 1, 1]


def test_nothing_is_overwritten_and_nothing_left_behind(tmp_path: Path) -> None:
    """An error leaves no partial corpus; existing ones stay; leftovers of a kill are removed."""
    folder = tmp_path / "c"
    with pytest.raises(UserError):
        build(folder, [[1]])
    with pytest.raises(UserError, match="256"):
        build(folder, [[1, 2], [3, 256]])
    with pytest.raises(UserError, match="-1"):
        build(folder, [[1, -1]])
    assert not list(tmp_path.iterdir())
    (tmp_path / ".c.0a1b2c3d").mkdir()
    (tmp_path / ".c.0a1b2c3d/tokens.bin").write_bytes(b"half")
    build(folder, [[1, 2]])
    with pytest.raises(UserError):
        build(folder, [[3, 4]])
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert Corpus(folder).read(0, 0, 2).tolist() == [1, 2]


def change(folder: Path, **changes: object) -> None:
    header = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps({**header, **changes}))


def without_blocks(folder: Path) -> None:
    """Makes a corpus one of a version that did not write checksums of blocks."""
    content = json.loads((folder / "corpus.json").read_text())
    del content["header_sha256"], content["sha256"]["blocks.bin"]
    content["format"] = "longrnn-corpus-1"
    (folder / "corpus.json").write_text(json.dumps(content))
    (folder / "blocks.bin").unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def unordered(folder: Path) -> None:
    np.array([5, 3], "<u8").tofile(folder / "documents.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: truncate(c / "tokens.bin"), "tokens.bin"),
        (lambda c: truncate(c / "documents.bin"), "documents.bin"),
        (lambda c: (c / "tokens.bin").unlink(), "tokens.bin"),
        (lambda c: (c / "corpus.json").unlink(), "corpus"),
        (lambda c: (c / "corpus.json").write_text("{"), "corpus.json"),
        (lambda c: (c / "corpus.json").write_text("[]"), "corpus.json"),
        (lambda c: change(c, format="longrnn-corpus-9"), ""),
        (lambda c: change(c, dtype="float64"), "corpus.json"),
        (lambda c: change(c, documents="2"), "corpus.json"),
        (lambda c: change(c, documents=0), "corpus.json"),
        (lambda c: change(c, surprise=1), "corpus.json"),
        (unordered, "documents.bin"),
        (shutil.rmtree, "corpus"),
    ],
)
def test_a_damaged_corpus_is_refused(tmp_path: Path, damage, message: str) -> None:
    """Every kind of damage is refused on opening or verifying."""
    build(tmp_path / "c", [[1, 2, 3], [4, 5]])
    damage(tmp_path / "c")
    with pytest.raises(UserError, match=message) as error:
        Corpus(tmp_path / "c")
    assert "\n" not in str(error.value)


def test_ids_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    """A token id outside the vocabulary is refused when it is read."""
    build(tmp_path / "c", [[1, 2, 3], [4, 5]])
    without_blocks(tmp_path / "c")
    np.array([1, 2, 3, 4, 300], "<u2").tofile(tmp_path / "c/tokens.bin")
    corpus = Corpus(tmp_path / "c")
    assert corpus.read(0, 0, 3).tolist() == [1, 2, 3]
    with pytest.raises(UserError, match=naming(300, 256)):
        corpus.read(1, 0, 2)
    with pytest.raises(UserError, match="tokens.bin"):
        corpus.verify()


def test_a_corpus_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """A corpus without checksums of blocks is read, and has the same hash as one built now."""
    build(tmp_path / "new", [[1, 2, 3], [4, 5]])
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    without_blocks(tmp_path / "old")
    old, new = Corpus(tmp_path / "old"), Corpus(tmp_path / "new")
    assert old.read(1, 0, 2).tolist() == [4, 5]
    assert old.sha256 == new.sha256
    old.verify()


def test_every_flipped_bit_of_a_corpus_is_noticed(tmp_path: Path) -> None:
    """A flipped bit is noticed on opening or, in the tokens, when its block is read."""
    build(tmp_path / "c", [[1, 2, 3], [4, 5], [6] * 50])
    for path in sorted((tmp_path / "c").iterdir()):
        whole = path.read_bytes()
        for place in range(0, len(whole), 3 if path.name == "corpus.json" else 1):
            for bit in range(8):
                damaged = bytearray(whole)
                damaged[place] ^= 1 << bit
                path.write_bytes(damaged)
                with pytest.raises(UserError) as error:
                    Corpus(tmp_path / "c").read(1, 0, 2)
                assert "\n" not in str(error.value)
                assert path.name in str(error.value)
        path.write_bytes(whole)
    assert Corpus(tmp_path / "c").read(1, 0, 2).tolist() == [4, 5]


def test_only_the_blocks_that_are_read_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block is verified once, when it is first read."""
    monkeypatch.setattr(corpus_columns, "BLOCK", 64)
    build(tmp_path / "c", [[7] * 200, [8] * 200])  # 800 bytes, 13 blocks
    assert (tmp_path / "c/blocks.bin").stat().st_size == 13 * 32
    tokens = bytearray((tmp_path / "c/tokens.bin").read_bytes())
    tokens[700] ^= 1
    (tmp_path / "c/tokens.bin").write_bytes(tokens)
    corpus = Corpus(tmp_path / "c")
    assert corpus.read(0, 0, 200).tolist() == [7] * 200
    assert corpus.read(1, 0, 100).tolist() == [8] * 100
    assert corpus.read(1, 0, 0).tolist() == []
    with pytest.raises(UserError, match=naming("tokens.bin", 640, 704)):
        corpus.read(1, 140, 160)
    assert corpus.read(1, 152, 200).tolist() == [8] * 48
    seen = []
    monkeypatch.setattr(corpus_columns.hashlib, "sha256", lambda *_: seen.append(1))
    corpus.read(0, 0, 200)
    assert not seen


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """A tokenizer with another fingerprint is refused."""
    build(tmp_path / "c", [[1, 2, 3]])
    corpus = Corpus(tmp_path / "c")
    corpus.check_tokenizer(ByteTokenizer())
    with pytest.raises(UserError, match=naming("bytes", "tokenizer")):
        corpus.check_tokenizer(Wide())
