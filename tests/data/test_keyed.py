"""Rows of text with keys: exact lengths, every key asked once, distances that grow."""

import re
from typing import Any

import pytest
import torch

from longrnn.data import TASKS, Text
from longrnn.data.prompts import PROMPT_HEADER, keys
from longrnn.errors import LengthError
from longrnn.text import ByteTokenizer
from tests.texts import TEXTS, trained_bpe

LENGTH = 400
LINE = r"\nPasskey (\d):(\d{5})\. Remember it\. \1:\2\.\n"
QUESTION = r"\nWhat is passkey (\d)\? Passkey \1:(\d{5})"


def build(tokenizer: Any, **options: Any) -> Text:
    made = {"kind": "keyed_text", "data": TEXTS, "keys": 2, "n_keys": [3], "grow_steps": 9}
    task = TASKS.build(made | options, tokenizer)
    assert isinstance(task, Text)
    return task


def row(task: Text, index: int) -> Any:
    return task.batch(index, range(3), of=3, length=LENGTH, seed=5, carried=False)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), trained_bpe()], ids=["bytes", "bpe"])
def test_the_last_rows_ask_for_keys_in_their_text(tokenizer: Any) -> None:
    """The others are those of the text; of a row, what is left beside keys is its beginning."""
    task, plain = build(tokenizer), TASKS.build({"kind": "text", "data": TEXTS}, tokenizer)
    batch, text = row(task, 4), row(plain, 4)  # type: ignore[arg-type]
    assert batch.tokens.shape == (3, LENGTH)
    for name in ("tokens", "targets"):
        assert torch.equal(getattr(batch, name)[0], getattr(text, name)[0])
    assert not batch.answers()[0].any()
    for place in (1, 2):
        whole = tokenizer.decode([*batch.tokens[place].tolist(), int(batch.targets[place, -1])])
        lines, asked = re.findall(LINE, whole), re.findall(QUESTION, whole)
        assert sorted(lines) == sorted(asked)
        assert len(asked) == 3
        assert {key for _, key in asked} <= set(keys(False))
        body = whole[: re.search(QUESTION, whole).start()]  # type: ignore[union-attr]
        left = re.sub(LINE, "", body).removeprefix(PROMPT_HEADER)
        assert tokenizer.decode(text.tokens[place].tolist()).startswith(left)
        answers = batch.targets[place][batch.answers()[place]].tolist()
        assert tokenizer.decode(answers) == "".join(key for _, key in asked)
        assert batch.weights[place].sum() == pytest.approx(2)


def test_the_distance_of_keys_grows() -> None:
    task, places = build(ByteTokenizer(), n_keys=[1]), []
    for index in range(40):
        text = bytes(row(task, index).tokens[2].tolist()).decode(errors="replace")
        places.append(text.index("\nThe passkey is") - len(PROMPT_HEADER))
    room = LENGTH - len(PROMPT_HEADER) - 100
    assert min(places[:3]) > room / 2
    assert min(places[8:]) < room / 5


def test_short_rows_have_fewer_keys_or_are_refused() -> None:
    task = build(ByteTokenizer(), n_keys=[9])
    how: dict[str, Any] = {"of": 1, "seed": 0, "carried": False}
    text = bytes(task.batch(0, range(1), length=250, **how).tokens[0].tolist()).decode(
        errors="replace"
    )
    assert len(re.findall(LINE, text)) == 2
    with pytest.raises(LengthError, match="at least 161 tokens"):
        task.batch(0, range(1), length=100, **how)
    held_out = build(ByteTokenizer(), part="held_out").held_out(2, length=300)
    assert b"passkey" not in bytes(held_out.tokens.flatten().tolist())
