"""A token whose embedding is not finite changes no other row of the batch, and no earlier call.

For every cell, position encoding and mitigation, at every split, with gradients. What becomes of
the later tokens of its row is not defined; a document start cuts it off (`test_packing`).
"""

import pytest
import torch

from longrnn import state as states
from longrnn.state import leaves
from tests.contracts.builders import (
    VOCAB,
    assert_near,
    assert_trees_near,
    differentiable,
    random_tokens,
)
from tests.contracts.subjects import Subject, every_kind, functional, read, small_chunks, started

pytestmark = pytest.mark.core

TIME, BAD = 30, 11


@every_kind
def test_other_rows_and_earlier_calls_do_not_change(subject: Subject) -> None:
    """Row 0 reads NaN and row 2 infinity: row 1, and those before, are as without."""
    model = subject.build(tie_embeddings=False)
    start = differentiable(started(model, 3))
    with torch.no_grad():
        model.embedding.weight[VOCAB - 1, 3:5] = torch.nan
        model.embedding.weight[VOCAB - 2, 3:5] = torch.inf
    tokens = random_tokens(3, TIME).clamp(max=VOCAB - 3)
    broken = tokens.clone()
    broken[[0, 2], BAD] = torch.tensor([VOCAB - 1, VOCAB - 2])
    sources = {name: leaf for name, leaf in leaves(start) if leaf.requires_grad}

    def gradients(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(sources.values())
        return torch.autograd.grad(functional(logits[1], 5), given, materialize_grads=True)

    clean, clean_state = read(model, tokens, start, [TIME])
    expected = gradients(clean)
    with small_chunks():
        logits, state = read(model, broken, start, [BAD, 1, 1, TIME - BAD - 2])
        found = gradients(logits)
    assert_near(logits[:, :BAD], clean[:, :BAD], 1e-10)
    assert_near(logits[1], clean[1], 1e-10)
    assert not logits[[0, 2], BAD].isfinite().any()
    ours, theirs = (states.take(one, [1]) for one in (state, clean_state))
    assert_trees_near(ours, theirs, 1e-10)
    for name, one, other in zip(sources, found, expected, strict=True):
        assert_near(one[1], other[1], 1e-10, name)
