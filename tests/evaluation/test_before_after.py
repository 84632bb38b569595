"""The held-out texts on which a fine-tuned model is compared with its checkpoint."""

from pathlib import Path

import pytest

from longrnn.checkpoints.opened import open_checkpoint
from longrnn.data import Instruct, Text
from longrnn.data.stream import Corpus
from longrnn.errors import UserError
from longrnn.evaluation.before_after import held_out_text, without_failed_passkeys, write_suite
from longrnn.evaluation.passkey import PasskeyRetrieval
from longrnn.evaluation.perplexity import Perplexity
from longrnn.text import ByteTokenizer
from tests.evaluation.small_models import SHORT, measure, small_model


def shelf(folder: Path, sizes: dict[str, int]) -> list[str]:
    """Files of so many different words, each of which begins with the name of its file."""
    for name, size in sizes.items():
        (folder / name).write_text(" ".join(f"{name}{k:03}" for k in range(size)))
    return [str(folder / name) for name in sizes]


def documents(*files: str) -> Corpus:
    return Text(data=list(files)).corpus


def test_windows_are_of_several_documents(tmp_path: Path) -> None:
    files = shelf(tmp_path, {"a": 2000, "b": 100, "c": 15, "d": 15})
    text = held_out_text(documents(*files), ByteTokenizer(), 200)
    first = dict.fromkeys(word[0] for word in text.split() if len(word) == 4)
    assert list(first) == ["a", "b", "c", "d"]
    assert text.index("a039") < text.index("d014") < text.index("a200")
    assert 16 * 200 <= len(text) < 16 * 240
    words = [word for word in text.split() if len(word) == 4]
    assert len(words) - len(set(words)) < 10  # pieces of words at both ends


def test_the_loss_is_measured_where_there_are_several_windows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to the longest length of which five windows fit; passkeys where a model recalls one."""
    files = shelf(tmp_path, {"a": 400, "b": 400, "c": 50})
    task = Text(data=files)
    suite = write_suite(task, ByteTokenizer(), tmp_path / "out", length=128)
    losses, passkeys = suite
    assert isinstance(losses, Perplexity)
    assert losses.options.lengths == [128, 256, 512]
    outcome = measure(losses, tmp_path / "r", small_model("one"))
    assert len(outcome.results["one"]) >= 5
    assert isinstance(passkeys, PasskeyRetrieval)
    assert passkeys.options.lengths == [512, 2048]
    assert "--validation" in caplog.text
    (kept,) = without_failed_passkeys([small_model("one")], suite, tmp_path / "r")
    assert isinstance(kept, Perplexity)
    assert "no passkey is recalled at 512" in caplog.text
    recalls = open_checkpoint("passkey-tiny")
    assert without_failed_passkeys([recalls], suite, tmp_path / "r") == suite
    short = small_model("short", position=SHORT)  # reads 300 tokens
    assert without_failed_passkeys([short], suite, tmp_path / "r") == [losses]
    task = Text(data=shelf(tmp_path, {"d": 20}))
    with pytest.raises(UserError, match="--validation"):
        write_suite(task, ByteTokenizer(), tmp_path / "short", length=128, longest=128)


def test_answers_are_evaluated_without_passkeys(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    task = Instruct(data=str(tmp_path / "a.jsonl"))
    (evaluation,) = write_suite(task, ByteTokenizer(), tmp_path / "out", length=512)
    assert evaluation.kind == "answers"
