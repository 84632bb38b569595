"""Files become a corpus: documents are complete and in order, whatever the size of the pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrnn.corpus import Corpus
from longrnn.errors import UserError
from longrnn.text import ByteTokenizer
from longrnn.training import documents
from longrnn.training.documents import build_corpus, pieces, read_chunks
from tests.refusals import naming


def build(out: Path, *files: Path, **how: object) -> list[str]:
    """The documents of a corpus as texts."""
    build_corpus(files, ByteTokenizer(), out, name="bytes", quiet=True, **how)  # type: ignore[arg-type]
    corpus = Corpus(out)
    corpus.verify()
    sizes = enumerate(corpus.lengths.tolist())
    return [ByteTokenizer().decode(corpus.read(k, 0, n).tolist()) for k, n in sizes]


def texts(chunks: list[str], split_on: str | None) -> list[str]:
    """Documents put together from their pieces."""
    found, current = [], ""
    for piece in pieces(chunks, split_on):
        current += piece.text
        if piece.ends:
            found.append(current)
            current = ""
    assert current == ""
    return found


@given(
    text=st.text("ab|\n ", max_size=60),
    marker=st.none() | st.sampled_from(["|", "||", "\n\n", "ab|a", "a|a"]),
    sizes=st.lists(st.integers(1, 9), max_size=20),
    piece=st.integers(1, 12),
)
def test_pieces_are_invisible(text: str, marker: str | None, sizes: list[int], piece: int) -> None:
    """Documents do not depend on where chunks and pieces end."""
    chunks, rest = [], text
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    before = documents.CHUNK_CHARACTERS
    documents.CHUNK_CHARACTERS = piece
    try:
        found = texts([*chunks, rest], marker)
    finally:
        documents.CHUNK_CHARACTERS = before
    assert found == ([text] if marker is None else text.split(marker))


def test_pieces_end_where_a_line_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece ends before a line that begins without a space."""
    monkeypatch.setattr(documents, "CHUNK_CHARACTERS", 12)
    text = "one two\n\n  three\nfour\nfive six seven eight nine\nten"
    found = [piece.text for piece in pieces([text], None) if piece.text]
    assert "".join(found) == text
    assert found == ["one two\n\n  t", "hree\nfour\n", "five six sev", "en eight nin", "e\n", "ten"]
    monkeypatch.setattr(documents, "CHUNK_CHARACTERS", 20)
    assert next(pieces([text], None)).text == "one two\n\n  three\n"


def test_one_file_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a file are kept, but for a byte-order mark, also at the borders of chunks."""
    contents = ["a\r\nü\n" * 9, "日本語 text " * 7, "\ufeffx\ufeff y"]
    files = [tmp_path / f"{index}.txt" for index in range(3)]
    for path, content in zip(files, contents, strict=True):
        path.write_bytes(content.encode())
    for piece in (1, 2, 5, 7, 2**20):
        monkeypatch.setattr(documents, "CHUNK_CHARACTERS", piece)
        assert build(tmp_path / f"c{piece}", *files) == [*contents[:2], "x\ufeff y"]


def test_empty_files_and_rows_are_counted(tmp_path: Path) -> None:
    """They are documents that were dropped; nothing between two separators is not a document."""
    pytest.importorskip("datasets")
    contents = {"a.txt": "", "b.txt": "\ufeff", "c.txt": "a text|", "d.jsonl": '{"text": ""}\n' * 2}
    files = [tmp_path / name for name in contents]
    for path, content in zip(files, contents.values(), strict=True):
        path.write_text(content)
    assert build(tmp_path / "c", *files, split_on="|") == ["a text"]
    header = Corpus(tmp_path / "c").header
    assert (header.dropped_documents, header.dropped_tokens) == (4, 0)


def test_separators(tmp_path: Path) -> None:
    """The separator is in no document, and empty documents are dropped."""
    path = tmp_path / "a.txt"
    path.write_text("<|end|>one two<|end|><|end|>three<|end|>x<|end|>")
    assert build(tmp_path / "c", path, split_on="<|end|>") == ["one two", "three"]
    header = Corpus(tmp_path / "c").header
    assert (header.dropped_documents, header.dropped_tokens) == (1, 1)
    assert header.sources == [str(path)]
    with pytest.raises(UserError, match="<END>"):
        build(tmp_path / "d", path, split_on="<END>")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_tables(suffix: str, tmp_path: Path) -> None:
    """Each row of a table is one document; a table without the column is refused."""
    datasets = pytest.importorskip("datasets")
    rows = ["first\nrow", "zweite Zeile ü", "a,b"]
    table = datasets.Dataset.from_dict({"text": rows, "id": [1, 2, 3], "body": ["xx"] * 3})
    path = tmp_path / f"t.{suffix}"
    writers = {"csv": table.to_csv, "parquet": table.to_parquet}
    writers.get(suffix, table.to_json)(str(path))
    assert build(tmp_path / "c", path) == rows
    assert build(tmp_path / "d", path, text_column="body") == ["xx"] * 3
    with pytest.raises(UserError, match=naming("id", "text")):
        build(tmp_path / "e", path, text_column="id")
    path.write_bytes(path.read_bytes()[:20])
    if suffix != "csv":  # half a table of comma-separated values is one
        with pytest.raises(UserError, match=naming(f"t.{suffix}")) as error:
            build(tmp_path / "e", path)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"abc\0", "NUL"),
        (b"abcdefgh\xff", "UTF-8"),
        (b"abcdef\xe6\x97", "UTF-8"),
        (b"abc\xe6\x97x", "UTF-8"),
    ],
)
def test_places_of_what_is_no_text(
    content: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the position of the bad byte in the file."""
    (tmp_path / "a").write_bytes(content)
    for piece in (1, 2, 3, 4, 100):
        monkeypatch.setattr(documents, "CHUNK_CHARACTERS", piece)
        with pytest.raises(UserError) as error:
            list(read_chunks(tmp_path / "a"))
        assert says in str(error.value)


def test_no_file_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays bounded for a file of any size."""
    monkeypatch.setattr(documents, "CHUNK_CHARACTERS", 1000)
    (tmp_path / "a.txt").write_text("all work and no play\n" * 5000)
    seen: list[int] = []

    class Watched(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            seen.append(len(text))
            return super().encode(text)

    header = build_corpus([tmp_path / "a.txt"], Watched(), tmp_path / "c", name="b", quiet=True)
    assert header.tokens == sum(seen) == 105_000
    assert max(seen) <= 1000
