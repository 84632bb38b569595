"""Autocast changes the precision of projections, and never that of a state.

No leaf of a state changes its dtype, and any split gives what one call gives, for every cell and
mitigation. That the recurrences give the same bits is tested with the backends.
"""

from typing import Any

import pytest
import torch

from longrnn.cells import Edit, StepwiseCell
from longrnn.state import leaves
from tests.contracts.builders import (
    D_MODEL,
    MIXER_SPECS,
    Spec,
    assert_near,
    assert_trees_equal,
    build_mixer,
    build_model,
    generator,
    random_tokens,
    spec_id,
)
from tests.contracts.subjects import Subject, assert_same, every_kind, outcome, started

pytestmark = pytest.mark.core

NARROW = torch.bfloat16
# A projection's sum may round to either neighbour, 2^-8 of it apart, where pieces of another length
# add it up in another order. Two layers, their gradients and growth: four such steps for each
# projection of a cell, relative to the largest entry. A state kept in 8 bits, or chunks multiplied
# in them, would be further off after a few hundred tokens.
TOLERANCE = 4 * 2**-8
TIME = 100
STEPWISE = [spec for spec in MIXER_SPECS if isinstance(build_mixer(spec), StepwiseCell)]


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=NARROW)


@pytest.mark.parametrize("edit", [None, Edit()], ids=["fused", "stepwise"])
@pytest.mark.parametrize("spec", STEPWISE, ids=spec_id)
def test_stepwise_cells_keep_their_precision(spec: Spec, edit: Edit | None) -> None:
    cell = build_mixer(spec, torch.float32)
    x, state = torch.randn(2, 20, D_MODEL + 2, generator=generator(1)), cell.init_state(2)
    expected, narrow = cell(x, state, edit), x.to(NARROW)
    with autocast():
        assert_trees_equal(cell(x, state, edit), expected)
        assert_trees_equal(cell(narrow, state, edit), cell(narrow.float(), state, edit))


def test_the_second_projection_of_decays_is_not_rounded() -> None:
    cell: Any = build_mixer(next(s for s in MIXER_SPECS if s["kind"] == "kda"), torch.float32)
    with torch.no_grad():
        cell.in_proj.weight.copy_(cell.in_proj.weight.to(NARROW))
    x = torch.eye(D_MODEL + 2)[None]  # so that the first projection is exact
    expected, _ = cell.before(x, cell.init_state(1), Edit(), None)
    with autocast():
        steps, _ = cell.before(x, cell.init_state(1), Edit(), None)
    assert_near(steps.decay.step, expected.decay.step, 1e-6)


@every_kind
def test_splits(subject: Subject) -> None:
    model, tokens = subject.build(torch.float32), random_tokens(2, TIME)
    start = started(model, 2)
    tolerance = TOLERANCE * max(2, len(model.cells[0].projections))
    like = [(name, leaf.dtype) for name, leaf in leaves(start)]
    with autocast():
        state = start
        for piece in tokens.split([30, 1, 1, 68], dim=1):
            state = model(piece, state).state
            assert [(name, leaf.dtype) for name, leaf in leaves(state)] == like
        whole = outcome(model, tokens, start, [TIME])
        parts = outcome(model, tokens, start, [37, *[1] * 8, 55])
        assert_same(parts, whole, torch.float32, tolerance)
    model(tokens, state)  # a state may leave autocast


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_a_float64_model_computes_in_float64(spec: Spec, wide: bool) -> None:
    model, tokens = build_model(spec, residual_in_fp32=wide), random_tokens(2, 20)
    expected = model(tokens).logits
    losses = model.token_losses(tokens[:, :-1], tokens[:, 1:])[0]
    with autocast():
        assert_near(model(tokens).logits, expected, 1e-12)
        assert_near(model.token_losses(tokens[:, :-1], tokens[:, 1:])[0], losses, 1e-12)
