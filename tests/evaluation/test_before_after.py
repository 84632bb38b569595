"""The held-out texts on which a fine-tuned model is compared with its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from longrnn.data import Text
from longrnn.data.stream import Documents
from longrnn.evaluation.before_after import held_out_texts, write_suite
from longrnn.evaluation.passkey import PasskeyRetrieval
from longrnn.evaluation.perplexity import Perplexity
from longrnn.text import ByteTokenizer


def shelf(folder: Path, sizes: dict[str, int]) -> list[str]:
    """Files of so many different words, each of which begins with the name of its file."""
    for name, size in sizes.items():
        (folder / name).write_text(" ".join(f"{name}{k:03}" for k in range(size)))
    return [str(folder / name) for name in sizes]


def documents(*files: str) -> Documents:
    return Text(data=list(files)).documents


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LONGRNN_CACHE", str(tmp_path / "cache"))


def test_windows_are_of_several_documents_and_do_not_overlap(tmp_path: Path) -> None:
    """Long documents give several, short ones are joined, and equal ones count once."""
    files = shelf(tmp_path, {"a": 400, "b": 100, "c": 15, "d": 15, "e": 15})
    (tmp_path / "copy").write_text((tmp_path / "b").read_text())
    texts = held_out_texts(documents(*files, str(tmp_path / "copy")), ByteTokenizer(), 200)
    assert all(len(text) > 200 for text in texts)
    assert [text[0] for text in texts[:3]] == ["a", "b", "c"]  # and the copy of b, which is b
    assert {word[0] for word in texts[2].split()} >= {"c", "d"}
    words = [word for text in texts for word in text.split()]
    assert len({word for word in words if len(word) == 4}) > 200
    assert len(words) - len(set(words)) < 3 * len(texts)  # pieces of words at both ends
    assert len(held_out_texts(documents(files[0]), ByteTokenizer(), 20)) == 16


def test_the_loss_is_measured_where_there_are_several_windows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to the longest length of which five windows fit, which a warning says."""
    files = shelf(tmp_path, {"a": 400, "b": 400, "c": 50})
    task = Text(data=files)
    suite = write_suite(task, ByteTokenizer(), tmp_path / "out", length=128)
    losses, passkeys = suite.evaluations
    assert isinstance(losses, Perplexity)
    assert losses.lengths == [128, 256, 512]
    assert len(losses.texts) == 6
    assert isinstance(passkeys, PasskeyRetrieval)
    assert passkeys.lengths == [512, 2048]
    assert "measured up to 512; give more with --validation" in caplog.text
