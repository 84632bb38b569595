"""Embeddings that are given, and vectors that are read or replaced between layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.mitigations import Mitigated
from longrnn.models import RecurrentLM, segments
from longrnn.models.vectors import Vectors
from longrnn.ops.collectives import ContextGroup
from longrnn.state import LMState
from tests.contracts.builders import (
    BLOCK_KINDS,
    DEFINED,
    MIXER_SPECS,
    POSITION_SPECS,
    assert_same,
    build_mitigated,
    build_model,
    random_start,
    random_state,
    random_tokens,
    real_leaves,
    spec_id,
)

pytestmark = pytest.mark.core

TIMES = 10  # rows of 70 tokens, so of two segments
IS_TOKEN = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1, 0]]).bool().repeat(1, TIMES)
IS_START = torch.tensor([[0, 1, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0, 0]]).bool().repeat(1, TIMES)
MASKS = {"is_token": IS_TOKEN, "is_document_start": IS_START}


def check(model: RecurrentLM | Mitigated, state: LMState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares calls on embeddings, and calls that read every layer, with a plain call."""
    monkeypatch.setattr(segments, "segment_tokens", lambda d_model: 1)
    plain = model.model if isinstance(model, Mitigated) else model
    assert isinstance(plain, RecurrentLM)
    tokens = random_tokens(2, 7 * TIMES)
    embeddings, nothing = plain.embedding(tokens), torch.zeros_like(tokens)
    numbers: list[int] = []

    def read(number: int, hidden: Tensor) -> Tensor:
        numbers.append(number)
        assert hidden.shape[:2] == tokens.shape
        # The first cell of a plain block reads positions beside the embeddings.
        assert number == 0 or hidden.shape[2] == plain.config.d_model
        assert not hidden[~IS_TOKEN].any()
        return hidden

    def leaves_of(given: Tensor, vectors: Vectors | None) -> dict[str, Tensor]:
        logits, after = model(given, state, keep=9, vectors=vectors, **MASKS)
        assert torch.equal(after.position, wanted_position)
        return {"logits": logits, **real_leaves(after, "state")}

    wanted_position = model(tokens, state, **MASKS).state.position
    wanted = leaves_of(tokens, None)
    assert_same(leaves_of(nothing, Vectors(embeddings)), wanted, torch.float64)
    assert not numbers
    for given, vectors in ((tokens, Vectors(None, read)), (nothing, Vectors(embeddings, read))):
        numbers.clear()
        assert_same(leaves_of(given, vectors), wanted, torch.float64)
        assert numbers == list(range(plain.config.n_layers + 1))


@pytest.mark.parametrize("block", BLOCK_KINDS)
@pytest.mark.parametrize("position", [spec["kind"] for spec in POSITION_SPECS])
@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_given_embeddings_and_reading_layers_change_nothing(
    spec: dict[str, Any], position: str, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In padded and packed rows, from any state."""
    model = build_model(spec, position, block)
    state = random_state(model, 2)._replace(position=torch.tensor([3, 0]))
    check(model, state, monkeypatch)


@pytest.mark.parametrize(("mitigation", "mixer"), DEFINED, ids=spec_id)
def test_the_same_under_a_mitigation(
    mitigation: dict[str, Any], mixer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_mitigated([mitigation], mixer)
    check(model, random_start(model, 2), monkeypatch)


@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_what_replaces_a_vector_is_read_by_the_next_layer(spec: dict[str, Any]) -> None:
    """The output of the first block for another input gives the logits of the other input."""
    model, tokens = build_model(spec), random_tokens(2, 9)
    other, seen = (tokens + 1) % model.vocab_size, list[Tensor]()
    model(other, vectors=Vectors(None, lambda _, hidden: (seen.append(hidden), hidden)[1]))
    replaced = Vectors(None, lambda number, hidden: seen[1] if number == 1 else hidden)
    torch.testing.assert_close(model(tokens, vectors=replaced).logits, model(other).logits)


def test_vectors_that_cannot_be_used_are_refused() -> None:
    model, tokens = build_model(), random_tokens(2, 5)
    embeddings = model.embedding(tokens)
    for wrong in (embeddings[:, :3], embeddings[..., :3]):
        with pytest.raises(UserError, match="shape"):
            model(tokens, vectors=Vectors(wrong))
    with pytest.raises(UserError, match="context"):
        model(tokens, context=ContextGroup(None, 0, 1), vectors=Vectors(embeddings))
