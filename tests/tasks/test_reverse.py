"""Reverse ordering: its held-out sequences, its distances."""

from __future__ import annotations

import itertools

import pytest
import torch

from longrnn.errors import UserError
from longrnn.tasks import Batch, Reverse
from longrnn.tasks.base import UNSCORED
from tests.refusals import naming


def test_held_out_sequences_are_never_sampled() -> None:
    """Training never samples a held-out sequence, though most draws collide here."""
    task = Reverse(vocab_size=3, held_out=12, seed=5)
    held_out = {tuple(row) for row in task.evaluation_batch(0, 12, length=3).tokens[:, :3].tolist()}
    seen: set[tuple[int, ...]] = set()
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        batch = task.sample(20, length=3, generator=generator)
        rows = batch.tokens[:, :3]
        assert torch.equal(batch.targets[:, 3:], rows.flip(1))
        seen |= {tuple(row) for row in rows.tolist()}
    everything = set(itertools.product(range(3), repeat=3))
    assert seen == everything - held_out


def test_held_out_sequences_depend_on_the_seed_alone() -> None:
    """The evaluation set depends on the seed, and not on how it is read."""
    task = Reverse(vocab_size=8, held_out=10, seed=3)
    whole = task.evaluation_batch(0, 10, length=5)
    again = Reverse(vocab_size=8, held_out=10, seed=3)
    parts = [again.evaluation_batch(start, start + 5, length=5).tokens for start in (0, 5)]
    assert torch.equal(torch.cat(parts), whole.tokens)
    other = Reverse(vocab_size=8, held_out=10, seed=4).evaluation_batch(0, 10, length=5)
    assert not torch.equal(other.tokens, whole.tokens)


@pytest.mark.parametrize(
    ("said", "wanted", "distance"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 0),
        ([2, 1, 3, 4], [1, 2, 3, 4], 1),  # one transposition
        ([1, 2, 0, 4], [1, 2, 3, 4], 1),  # one substitution
        ([2, 3, 4, 0], [1, 2, 3, 4], 2),  # a deletion and an insertion
        ([2, 1, 4, 3], [1, 2, 3, 4], 2),
        ([0, 0, 0, 0], [1, 2, 3, 4], 4),
    ],
)
def test_edit_distance_by_hand(said: list[int], wanted: list[int], distance: int) -> None:
    """Damerau-Levenshtein distance over the scored tokens, computed by hand."""
    batch = Batch(
        tokens=torch.zeros(1, 8, dtype=torch.long),
        targets=torch.tensor([[UNSCORED] * 4 + wanted]),
        is_document_start=torch.tensor([True]),
    )
    predictions = torch.tensor([[9, 9, 9, 9, *said]])
    scores = Reverse(vocab_size=5).score(predictions, batch)
    right = sum(a == b for a, b in zip(said, wanted, strict=True))
    assert scores["edit_distance"].tolist() == [distance]
    assert scores["token_accuracy"].tolist() == [right / 4]
    assert scores["exact_match"].tolist() == [float(distance == 0)]


def test_errors_contain_the_remedy() -> None:
    """Holding out more than half of all sequences is refused."""
    with pytest.raises(UserError, match="vocab_size must be from 2"):
        Reverse(vocab_size=1)
    with pytest.raises(UserError, match="held_out must be from 1"):
        Reverse(held_out=0)
    generator = torch.Generator()
    with pytest.raises(UserError, match=naming(8, "length 3")):
        Reverse(vocab_size=2, held_out=5).sample(1, length=3, generator=generator)
    Reverse(vocab_size=2, held_out=4).sample(1, length=3, generator=generator)
    with pytest.raises(UserError, match="length"):
        Reverse().sample(1, length=0, generator=generator)
