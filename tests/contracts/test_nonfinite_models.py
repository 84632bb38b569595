"""A token whose embedding is not finite changes nothing before it, and no other row of the batch.

For every cell, position encoding and mitigation, at every split, with gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import state as states
from longrnn.ops.ssd import BACKENDS
from longrnn.positions import POSITIONS
from longrnn.state import LMState, leaves
from tests.contracts.builders import (
    BLOCK_KINDS,
    DEFINED,
    VOCAB,
    assert_near,
    build_mitigated,
    differentiable,
    functional,
    is_interpreted,
    random_start,
    random_tokens,
    recurrent,
    small_chunks,
    spec_id,
    with_positions,
)
from tests.contracts.test_nonfinite import INF, NAN, assert_equal_or_both_not_finite

pytestmark = pytest.mark.core

MODELS = {
    f"{spec_id(spec)}-{spec_id(mixer | backend)}": ([spec], mixer | backend)
    for spec, mixer in DEFINED
    for backend in ([{"backend": b} for b in BACKENDS] if mixer["kind"] == "mamba2" else [{}])
}


@pytest.mark.parametrize(("specs", "mixer", "position"), with_positions(MODELS))
def test_every_model(specs: list[dict[str, Any]], mixer: dict[str, Any], position: str) -> None:
    """A token with a non-finite embedding affects no earlier token and no other row."""
    small, number = is_interpreted(mixer), list(POSITIONS).index(position)
    model = build_mitigated(
        specs,
        mixer,
        position=position,
        block=BLOCK_KINDS[number % 2],
        tie_embeddings=False,
        n_layers=1 if small else 2,
    )
    with torch.no_grad():
        recurrent(model).embedding.weight[VOCAB - 1, 3:5] = (NAN, INF, -INF)[number % 3]
    tokens = random_tokens(2, 15).clamp(max=VOCAB - 2)
    broken = tokens.clone()
    broken[0, 5] = VOCAB - 1
    with small_chunks():
        _assert_contained(model, tokens, broken, 5)


def _assert_contained(model: Any, tokens: Tensor, broken: Tensor, bad: int) -> None:
    def run(tokens: Tensor, sizes: list[int], state: LMState) -> tuple[Tensor, LMState]:
        logits = []
        for piece in tokens.split(sizes, dim=1):
            part, state = model(piece, state)
            logits.append(part)
        return torch.cat(logits, 1), state

    start = differentiable(random_start(model, 2))
    time = tokens.shape[1]
    clean, clean_state = run(tokens, [time], start)
    logits, state = run(broken, [time], start)
    assert_near(logits[0, :bad], clean[0, :bad], 1e-10)
    assert_near(logits[1], clean[1], 1e-10)
    assert not logits[0, bad].isfinite().any()
    pairs = zip(leaves(states.take(state, [1])), leaves(states.take(clean_state, [1])), strict=True)
    for (name, ours), (_, theirs) in pairs:
        assert_near(ours, theirs, 1e-10, name)

    sources = [leaf for _, leaf in leaves(start) if leaf.requires_grad]
    found, wanted = (
        torch.autograd.grad(functional(of[1], 5), sources, materialize_grads=True)
        for of in (logits, clean)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert_near(ours[1], theirs[1], 1e-10)

    start = states.detach(start)
    with torch.no_grad():
        by_token, last = run(broken, [1] * time, start)
        for sizes in ([time], [bad, time - bad], [bad + 1, 1, time - bad - 2]):
            logits, state = run(broken, sizes, start)
            assert_equal_or_both_not_finite(logits, by_token, f"logits {sizes}")
            for (name, ours), (_, theirs) in zip(leaves(state), leaves(last), strict=True):
                assert_equal_or_both_not_finite(ours, theirs, f"{name} {sizes}")
