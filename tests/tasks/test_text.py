"""The text task: rows of real text, shifted by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longrnn.errors import UserError
from longrnn.tasks import Text
from longrnn.tasks.base import UNSCORED
from longrnn.text import ByteTokenizer
from tests.refusals import naming
from tests.tasks.corpora import text_corpus
from tests.tasks.drawings import drawing


def write(folder: Path, *texts: str) -> list[str]:
    paths = [folder / f"{index}.txt" for index in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return [str(path) for path in paths]


def draw(task: Text, length: int, rows: int = 1) -> torch.Tensor:
    batch = task.sample(rows, length=length, generator=torch.Generator().manual_seed(0))
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    return torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1)


def test_drawing(tmp_path: Path) -> None:
    """The docstring's drawing is what `sample` makes."""
    rows = drawing(Text)
    batch = Text(files=write(tmp_path, "to be")).sample(1, length=4, generator=torch.Generator())
    assert "".join(rows["tokens"]) == bytes(batch.tokens[0].tolist()).decode()
    assert "".join(rows["targets"]) == bytes(batch.targets[0].tolist()).decode()


def test_rows_stay_inside_one_file(tmp_path: Path) -> None:
    """Rows start anywhere in every file and never cross the end of one."""
    task = Text(files=write(tmp_path, "abcdef", "x", "123456789"))
    found = {ByteTokenizer().decode(row.tolist()) for row in draw(task, 3, rows=400)}
    wanted = {"abcdef"[i : i + 4] for i in range(3)} | {"123456789"[i : i + 4] for i in range(6)}
    assert found == wanted


def test_a_length_that_no_text_has(tmp_path: Path) -> None:
    """The error names the longest possible length."""
    task = Text(files=write(tmp_path, "abcdef"))
    assert draw(task, 5).shape == (1, 6)
    with pytest.raises(UserError, match="5"):
        draw(task, 6)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, ""), (b"", "empty"), (b"a\0b", "binary"), (b"a\xff", "UTF-8")],
)
def test_files_that_are_no_text(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """The error is one sentence that names the file."""
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=reason):
        Text(files=[str(path)])


def test_files_are_needed() -> None:
    with pytest.raises(UserError, match="files"):
        Text(files=[])


def test_packed_rows_hold_whole_short_documents(tmp_path: Path) -> None:
    """Packed rows hold documents of any length; no target is the start of another document."""
    texts = ["ab", "x", "cdefg", "hi", "", "jklmnopqr"]
    corpus = text_corpus(tmp_path / "c", texts)
    task = Text(corpus=corpus, packing=True)
    batch = task.sample(300, length=6, generator=torch.Generator().manual_seed(1))
    follows = {text[k : k + 2] for text in texts for k in range(len(text) - 1)}
    pairs = torch.stack([batch.tokens, batch.targets], 2).flatten(0, 1)
    assert {bytes(pair).decode() for pair in pairs.tolist()} == follows
    assert bool((batch.targets != UNSCORED).all())
    assert batch.is_token is None
    assert batch.begins.all()
    # Inside a row, a document starts exactly where the input does not continue.
    jumps = batch.tokens[:, 1:] != batch.targets[:, :-1]
    assert torch.equal(batch.is_document_start[:, 1:], jumps)
    places = sum(max(0, len(text) - 1) for text in texts)
    with pytest.raises(UserError, match=naming(places)):
        task.sample(1, length=places + 1, generator=torch.Generator())
    assert task.left_out(6) == ""
    assert "4 documents" in Text(corpus=corpus).left_out(6)


def test_a_folder_stands_for_its_text_files(tmp_path: Path) -> None:
    """A folder among `files` stands for the text files in it and below, without hidden ones."""
    (tmp_path / "in/.git").mkdir(parents=True)
    for name, text in [("b.txt", "bbb"), ("in/a.md", "aaa"), ("in/.git/x.txt", "xxx"), ("c", "c")]:
        (tmp_path / name).write_text(text)
    task = Text(files=[str(tmp_path)])
    assert [bytes(text.tolist()) for text in task.documents.texts] == [b"bbb", b"aaa"]  # type: ignore[attr-defined]
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="none"):
        Text(files=[str(tmp_path / "none")])


def test_data_that_is_not_tokenized(tmp_path: Path) -> None:
    """The task itself reads a corpus; other data is tokenized by training."""
    corpus = text_corpus(tmp_path / "c", ["some text"])
    assert Text(data=corpus).packing
    with pytest.raises(UserError, match="longrnn data build"):
        Text(data=str(tmp_path))
