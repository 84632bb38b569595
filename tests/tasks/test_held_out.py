"""Documents that are held out: disjoint from those to train on, and the same for every run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longrnn.corpus import Corpus
from longrnn.errors import UserError
from longrnn.tasks import TASKS
from longrnn.tasks.held_out import HELD_OUT, SHARE, TRAINING, Portion
from longrnn.training.trainer import Trainer
from tests.refusals import naming
from tests.tasks.corpora import instruct_corpus, text_corpus
from tests.training.runs import tiny


def content(part: Portion) -> list[bytes]:
    return [
        bytes(part.read(document, 0, int(size)).tolist())
        for document, size in enumerate(part.lengths)
    ]


def test_the_parts_are_the_whole_and_share_no_document(tmp_path: Path) -> None:
    """About the share of tokens that was asked for is held out, in whole documents."""
    texts = [f"{k} " * (20 + k % 7) for k in range(100, 300)]
    whole = Corpus(Path(text_corpus(tmp_path / "corpus", texts)))
    parts = {part: Portion(whole, part) for part in (TRAINING, HELD_OUT)}
    found = {part: content(portion) for part, portion in parts.items()}
    assert sorted(found[TRAINING] + found[HELD_OUT]) == sorted(text.encode() for text in texts)
    assert SHARE <= parts[HELD_OUT].lengths.sum() / whole.lengths.sum() < 1.2 * SHARE
    assert len({whole.sha256, *(portion.sha256 for portion in parts.values())}) == 3
    assert content(Portion(whole, HELD_OUT)) == found[HELD_OUT]


@pytest.mark.parametrize("sizes", [[4000], [3000, 3000], [10_000, 40], [900] * 7, [9, 500, 9, 9]])
def test_of_long_documents_the_ends_are_held_out(sizes: list[int], tmp_path: Path) -> None:
    """Where 5 % are less than five documents, the longest ones give an equal share each."""
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, size))) for size in sizes]
    whole = Corpus(Path(text_corpus(tmp_path / "corpus", texts)))
    training, held_out = (content(Portion(whole, part)) for part in (TRAINING, HELD_OUT))
    assert len(training) == len(texts)
    assert len(held_out) == min(5, sum(size >= 40 for size in sizes))
    ends = iter(held_out)
    for text, begin in zip(texts, training, strict=True):
        end = text.encode()[len(begin) :]
        assert text.encode().startswith(begin)
        assert not end or end == next(ends)
        assert len(end) <= 0.1 * len(text)
    assert SHARE * sum(sizes) - 9 < sum(map(len, held_out)) <= SHARE * sum(sizes)


def test_answers_are_held_out_whole(tmp_path: Path) -> None:
    """Prompts stay with their answers, and the parts count their own answer tokens."""
    pairs = [(f"{k}+1=", f"{k + 1};") for k in range(50)]
    folder = instruct_corpus(tmp_path / "corpus", pairs)
    whole = Corpus(Path(folder))
    held_out: Any = TASKS.build({"kind": "instruct", "corpus": folder, "part": HELD_OUT})
    assert len(held_out.documents.lengths) == 5
    scored = [Portion(whole, part).scored_tokens for part in (TRAINING, HELD_OUT)]
    assert sum(scored) == whole.scored_tokens
    assert min(scored) > 0
    batch = held_out.sample(2, length=16, generator=torch.Generator())
    assert bool(batch.answers().any())
    single = instruct_corpus(tmp_path / "one", pairs[:1])
    with pytest.raises(UserError):
        TASKS.build({"kind": "instruct", "corpus": single, "part": HELD_OUT})


def test_a_run_validates_on_the_part_that_it_does_not_train_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The two parts of the same data go together; the same part twice is refused."""
    folder = text_corpus(tmp_path / "corpus", [f"{k} is a number. " * 30 for k in range(16)])
    how: dict[str, Any] = {"length": {"max": 32}, "max_steps": 1, "eval_samples": 1}

    def trainer(training: str, validation: str) -> Trainer:
        data = {"kind": "text", "data": folder}
        task, held_out = data | {"part": training}, data | {"part": validation}
        data = {"task": task, "validation": held_out, "batch_tokens": None}
        return Trainer(tiny("pass", tmp_path / "run", **data, **how), quiet=True)

    for parts in ((TRAINING, TRAINING), ("all", HELD_OUT), (HELD_OUT, "all")):
        with pytest.raises(UserError):
            trainer(*parts)
    with pytest.raises(UserError, match=naming("part", "test")):
        trainer("test", HELD_OUT)
    trainer(TRAINING, HELD_OUT).train()
    warning = "the validation data has no row of 512 tokens: the loss is measured on rows of 256"
    assert warning in caplog.text
