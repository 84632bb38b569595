"""Passkey retrieval: exact lengths, a split of the keys, and one drawing."""

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longrnn.data import Passkey
from longrnn.data.passkey import with_numbers
from longrnn.data.prompts import (
    ANSWER,
    FILLER,
    KEY_LINE,
    PROMPT_HEADER,
    QUESTION,
    Needle,
    keys,
)
from longrnn.errors import UserError
from longrnn.text import ByteTokenizer
from tests.data.drawings import drawing
from tests.refusals import naming
from tests.texts import trained_bpe


def task_with(tokenizer: str) -> Passkey:
    return Passkey() if tokenizer == "bytes" else Passkey(trained_bpe())


TOKENIZERS = ["bytes", "bpe"]


class Signs(ByteTokenizer):
    """A tokenizer that knows the parts of a passkey prompt as the signs of the drawing."""

    vocab_size = 128
    parts = {PROMPT_HEADER: "HH", FILLER: "f", KEY_LINE.format(key="42719"): "KK", QUESTION: "QQ"}

    def encode(self, text: str) -> list[int]:
        return [ord(sign) for sign in self.parts.get(text, text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def test_the_drawing_in_the_docstring() -> None:
    task = Passkey(Signs())
    needles = [Needle("42719", 3 / 8)]
    text = task.context(needles, 0, length=14)
    batch = task.batch_of([task._row(text, needles)])
    targets = [chr(i).replace(" ", "_") for i in batch.targets[0].tolist()]
    assert drawing(Passkey) == {
        "tokens": [chr(i) for i in batch.tokens[0].tolist()],
        "targets": targets,
        "answer": ["x" if asked else "." for asked in batch.answers()[0].tolist()],
    }


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(
    extra=st.integers(0, 3000),
    depth=st.floats(0, 1),
    pick=st.integers(0, len(keys(True)) - 1),
)
@example(extra=0, depth=0.0, pick=0)
@example(extra=1000, depth=1.0, pick=1)
@settings(max_examples=25)
def test_prompts_have_exactly_the_length_asked(
    tokenizer: str, extra: int, depth: float, pick: int
) -> None:
    task, key = task_with(tokenizer), keys(True)[pick]
    length = task.least_length() + extra
    prompt = task.prompt_of([Needle(key, depth)], 0, length=length)
    assert prompt.shape == (length,)
    assert prompt.dtype == torch.int64
    text = task.tokenizer.decode(prompt.tolist())
    line = KEY_LINE.format(key=key)
    assert text.startswith(PROMPT_HEADER)
    assert text.endswith(QUESTION)
    assert text.count(line) == 1
    # The key line stands where the depth says, counted in tokens of filler.
    filler = len(prompt) - sum(len(task.ids(part)) for part in (PROMPT_HEADER, line, QUESTION))
    start = text.index(line) - len(PROMPT_HEADER)
    end = len(text) - text.index(line) - len(line) - len(QUESTION)
    if filler > 500:
        assert start / (start + end) == pytest.approx(depth, abs=0.05)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_the_least_length_is_the_least(tokenizer: str) -> None:
    task = task_with(tokenizer)
    least = task.least_length()
    lines = {key: len(task.ids(KEY_LINE.format(key=key))) for key in keys(True)[::97]}
    longest = max(lines, key=lambda key: lines[key])
    needles = [Needle(longest, 0.5)]
    assert len(task.prompt_of(needles, 0, length=least)) == least
    with pytest.raises(UserError, match=naming(least)) as error:
        task.prompt_of(needles, 0, length=least - 1)
    assert "\n" not in str(error.value)


def test_training_never_shows_a_held_out_key() -> None:
    task = Passkey(max_segments=2)
    batch = task.sample(800, length=200, seed=0)
    streams = task.batch(0, range(400), of=400, length=200, seed=0, carried=True)
    shown = [
        re.search(r"passkey is (\d{5})\.", ByteTokenizer().decode(row))
        for row in [*batch.tokens.tolist(), *streams.tokens.tolist()]
    ]
    found = {match[1] for match in shown if match}
    assert len(found) > 900
    assert not found & set(keys(True))
    assert 0.1 < len(keys(True)) / (len(keys(True)) + len(keys(False))) < 0.15
    for side, place in product((keys(True), keys(False)), range(5)):
        assert {key[place] for key in side} == set("0123456789")


def queries_of(text: str) -> list[tuple[str, str]]:
    """The (number, key) of each question with its answer, the last of which lacks a digit."""
    return re.findall(r"What is passkey (\d)\? Passkey \1:(\d{4,5})", text)


def test_several_queries_follow_one_another() -> None:
    task, counts = Passkey(n_keys=[1, 2, 4], n_queries=3), set()
    batch = task.sample(24, length=300, seed=4)
    assert torch.equal(batch.targets[:, :299], batch.tokens[:, 1:300])
    for tokens, targets, answer in zip(batch.tokens, batch.targets, batch.answers(), strict=True):
        text = task.tokenizer.decode(tokens.tolist())
        lines = dict(re.findall(r"Passkey (\d):(\d{5})\. Remember", text))
        said = task.tokenizer.decode(targets[answer].tolist())
        if not lines:
            (key,) = re.findall(r"passkey is (\d{5})\.", text)
            assert (said, text[:300].endswith(QUESTION)) == (ANSWER.format(key=key), True)
            counts.add((1, 1))
            continue
        asked = [number for number, _ in queries_of(text[300 - 40 :])]
        counts.add((len(lines), len(set(asked))))
        assert said == "".join(lines[number] for number in asked)
        assert text[:300].endswith(f"passkey {asked[0]}? Passkey {asked[0]}:")
    assert counts == {(1, 1), (2, 2), (4, 3)}


def test_a_row_is_right_where_all_keys_are() -> None:
    """One wrong digit makes a row wrong; the text before the answers counts in the loss alone."""
    task = Passkey(n_keys=4, n_queries=4, text_weight=0.3)
    batch = task.sample(2, length=300, seed=5)
    assert batch._asdict()["weights"].sum(1).tolist() == pytest.approx([1.3] * 2)
    predictions = batch.targets.clone()
    predictions[0, 301] += 1  # a digit of the first answer
    predictions[1, :200] += 1  # text before the answers
    assert task.score(predictions, batch)["exact_match"].tolist() == [0, 1]


def test_numbered_keys() -> None:
    task = Passkey(n_keys=3)
    needles = [Needle("40913", 0.9, 1), Needle("00001", 0.1, 2), Needle("77777", 0.5, 3)]
    prompt = task.prompt_of(needles, 1, length=600)
    assert len(prompt) == 600
    text = task.tokenizer.decode(prompt.tolist())
    places = [text.index(f"Passkey {line}.") for line in ("2:00001", "3:77777", "1:40913")]
    assert places == sorted(places)
    assert text.endswith("What is passkey 2? Passkey 2:")
    assert task.context(needles, 1, length=600).tolist() == prompt.tolist()[:-30]


def test_fillers_of_files_with_numbers(tmp_path: Path) -> None:
    """The filler of files begins anywhere; numbers among its words have the requested rate."""
    words = [f"w{'abcdefghij'[i % 10]}" for i in range(20_000)]
    text = " ".join(words)
    parts = with_numbers(text, 100).split(" ")
    numbers = [part for part in parts if part.isdigit()]
    assert [part for part in parts if not part.isdigit()] == words
    assert len(numbers) == pytest.approx(len(text) / 100, rel=0.15)
    assert {len(number) for number in numbers} == {1, 2, 3, 4, 5, 6}
    (tmp_path / "a").write_text(text + "x" * 30_000)
    plain, other = (Passkey(filler=str(tmp_path / "a"), numbers_every=n) for n in (None, 9))
    assert plain.n_filler < other.n_filler
    assert plain.data_sha256 != other.data_sha256
    rows = [ByteTokenizer().decode(row) for row in plain.sample(40, length=256).tokens.tolist()]
    assert 0 < sum("xxxxx" in row for row in rows) < 40
