"""Chunk selection equals a loop that reads each chunk separately."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.evaluation.options import PasskeyOptions
from longrnn.inference.chunk_select import select
from longrnn.models import LanguageModel
from tests.contracts.builders import build_mitigated, build_model, random_tokens
from tests.evaluation.small_models import Oracle, measure

pytestmark = pytest.mark.core

MODELS: dict[str, LanguageModel] = {
    "mamba2": build_model("mamba2"),
    "lstm": build_model("lstm", position="sinusoidal"),
    "windowed": build_mitigated([{"kind": "sliding_window", "window": 5}]),
}
CONTEXT, QUERY, PREFIX = random_tokens(1, 23, 1)[0], random_tokens(1, 4, 2)[0], [3, 1, 2]


@torch.no_grad()
def loop(
    model: LanguageModel, context: Tensor, query: Tensor, chunk: int, prefix: list[int]
) -> list[float]:
    """The entropy of the answer for each chunk."""
    entropies = []
    ids = context.tolist()
    for start in range(0, len(ids), chunk):
        read = model(torch.tensor([prefix + ids[start : start + chunk]]))
        chances = model(query[None], read.state).logits[0, -1].softmax(-1).tolist()
        entropies.append(-sum(p * math.log(p) for p in chances))
    return entropies


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("chunk", "batch"), [(1, 16), (5, 16), (23, 16), (50, 16), (6, 1), (6, 3)])
@pytest.mark.parametrize("prefix", [[], PREFIX], ids=["alone", "prefix"])
def test_chunks_and_batches_of_every_size_equal_the_loop(
    name: str, chunk: int, batch: int, prefix: list[int]
) -> None:
    model = MODELS[name]
    entropies = loop(model, CONTEXT, QUERY, chunk, prefix)
    given = torch.tensor(prefix, dtype=torch.long)
    ours = select(model, CONTEXT, QUERY, chunk=chunk, prefix=given, batch_size=batch)
    assert ours.entropies.tolist() == pytest.approx(entropies, rel=1e-12)
    # Chunks of one token repeat each other, and equal chunks differ by rounding.
    assert entropies[ours.chunk] == pytest.approx(min(entropies), rel=1e-12)
    part = CONTEXT.split(chunk)[ours.chunk].tolist()
    assert ours.prompt.tolist() == [*prefix, *part, *QUERY.tolist()]


def test_passkeys(tmp_path: Path) -> None:
    """A chunk as long as the prompt, or longer, gives the answers of the plain prompt."""
    for chunk in (None, 600, 4096):
        for forgets, recalled in ((300, False), (9999, True)):
            output, oracle = tmp_path / f"{chunk}-{forgets}", Oracle(forgets=forgets)
            grid: dict[str, Any] = {"lengths": [600], "n": 2, "depths": [0, 0.35, 1]}
            outcome = measure(PasskeyOptions(**grid, chunk_select=chunk), output, oracle)
            assert [row["correct"] for _, row in outcome.results["model0"]] == [recalled] * 6
