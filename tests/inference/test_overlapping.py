"""Losses in overlapping windows equal a loop that reads every window by itself."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.inference import trie
from longrnn.inference.engine import overlapping_losses
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from tests.contracts.builders import KINDS_OF_CELLS, build_model, random_tokens

# Length, context and stride: equal ones, partial last windows, a stride of one token, one window.
SHAPES = [
    (40, 16, 8),
    (41, 16, 8),
    (47, 16, 5),
    (23, 7, 7),
    (24, 7, 7),
    (12, 5, 1),
    (16, 16, 3),
    (9, 16, 4),
    (17, 16, 16),
]


def one_by_one(
    model: LanguageModel, tokens: Tensor, context: int, stride: int
) -> tuple[Tensor, int]:
    """Return the losses of one text and the tokens that were read, with a loop over its windows."""
    length, scored, read = len(tokens) - 1, 0, 0
    losses = torch.full((length,), float("nan"), dtype=torch.float64)
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        logits = model(tokens[None, begin:end]).logits[0].double()
        nats = F.cross_entropy(logits, tokens[begin + 1 : end + 1], reduction="none")
        losses[scored:end] = nats[scored - begin :]
        scored, read = end, read + end - begin
        if end == length:
            break
    return losses, read


def together(model: LanguageModel, tokens: Tensor, **options: int) -> tuple[Tensor, int]:
    """Return the losses of `overlapping_losses`, each exactly once, and the tokens read."""
    losses = torch.full((len(tokens), tokens.shape[1] - 1), float("nan"), dtype=torch.float64)
    with Progress("", 0, unit="tokens", quiet=True) as progress:
        for start, nats in overlapping_losses(model, tokens, progress, **options):
            part = losses[:, start : start + nats.shape[1]]
            assert part.shape == nats.shape
            assert bool(part.isnan().all()), "a token was scored twice"
            part.copy_(nats)
    assert progress.done == losses.numel()
    return losses, progress.units


@pytest.mark.parametrize("mixer", KINDS_OF_CELLS)
@pytest.mark.parametrize(("length", "context", "stride"), SHAPES)
def test_windows_equal_a_loop(
    mixer: str, length: int, context: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trie, "SCORED_TOKENS", 6)  # so that windows are scored in parts
    model = build_model(mixer, position="sinusoidal")
    tokens = random_tokens(3, length + 1, 1)
    with torch.no_grad():
        expected = [one_by_one(model, row, context, stride) for row in tokens]
    for rows in (1, 7, 100):
        found, read = together(model, tokens, context=context, stride=stride, rows=rows)
        torch.testing.assert_close(
            found, torch.stack([losses for losses, _ in expected]), rtol=1e-5, atol=1e-6
        )
        assert read == sum(count for _, count in expected)
