"""Autocast changes the precision of projections, and never that of a state.

The recurrences give the same bits with autocast and without, no leaf of a state changes its dtype,
and any split gives what one call gives, for every cell and mitigation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.mixers import StepwiseMixer
from longrnn.mixers.base import Edit
from longrnn.ops.ssd import BACKENDS, SSD, ScanInputs
from longrnn.ops.ssd.rescale import LIMITED, rescaled_ssd
from longrnn.ops.ssd.window import WINDOWED, windowed_ssd
from longrnn.ops.ssd.window_carry import init_carry
from longrnn.state import PyTree, leaves
from tests.contracts.builders import (
    D_MODEL,
    DEFINED,
    MIXER_SPECS,
    assert_near,
    assert_trees_equal,
    build_mitigated,
    build_mixer,
    build_model,
    generator,
    model_outcome,
    random_start,
    random_state,
    random_tokens,
    random_tree,
    spec_id,
    with_kernels,
)

pytestmark = pytest.mark.core

NARROW = torch.bfloat16
# A projection's sum may round to either neighbour, 2^-8 of it apart, where pieces of another length
# add it up in another order. Two layers with two projections each, their gradients and a factor of
# two of growth: eight such steps, relative to the largest entry. A state kept in 8 bits, or chunks
# multiplied in them, would be further off after a few hundred tokens.
TOLERANCE = 8 * 2**-8
SPLITS = [[1] * 12 + [88], [64, 36], [37, 1, 62]]
TIME = 100


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=NARROW)


def scan_inputs(time: int = TIME) -> tuple[ScanInputs, Tensor]:
    randomness = generator(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=randomness)

    x, gain = normal(time, 4, 3), normal(time, 4)
    B, C = normal(time, 2, 5), normal(time, 2, 5)
    return ScanInputs(x, gain, -normal(time, 4).square(), B, C), normal(4, 3, 5)


def plain(inputs: ScanInputs, state: Tensor, ssd: SSD) -> PyTree:
    return ssd(inputs, state)


def limited(inputs: ScanInputs, state: Tensor, ssd: SSD) -> PyTree:
    limit = torch.tensor([0.5, 1.0, 4.0, 1e3], dtype=torch.float64)
    return rescaled_ssd(inputs, state, limit, ssd)


def windowed(inputs: ScanInputs, state: Tensor, ssd: SSD) -> PyTree:
    like = ScanInputs(*(tensor[0, :1] for tensor in inputs))
    return windowed_ssd(inputs, init_carry(like, state, 70), 70, ssd)


RECURRENCES = [
    *((plain, backend) for backend in BACKENDS),
    *((limited, backend) for backend in with_kernels(LIMITED)),
    *((windowed, backend) for backend in with_kernels(WINDOWED)),
]


@pytest.mark.parametrize("time", [1, TIME])
@pytest.mark.parametrize(("recurrence", "backend"), RECURRENCES)
def test_recurrences_keep_their_precision(
    recurrence: Callable[[ScanInputs, Tensor, SSD], PyTree], backend: str, time: int
) -> None:
    """Values and gradients are the same bits with and without autocast."""
    inputs, state = scan_inputs(time)
    tensors = [tensor.requires_grad_() for tensor in (*inputs, state)]

    def outcome(*, cast: bool) -> tuple[PyTree, Any]:
        with torch.autocast("cpu", dtype=NARROW, enabled=cast):
            results = recurrence(ScanInputs(*tensors[:5]), tensors[5], BACKENDS[backend])
        loss = results[0].sum() + results[1].square().sum()
        return results, torch.autograd.grad(loss, tensors, materialize_grads=True)

    for ours, theirs in zip(outcome(cast=True), outcome(cast=False), strict=True):
        assert_trees_equal(ours, theirs)


STEPWISE = [spec for spec in MIXER_SPECS if isinstance(build_mixer(spec), StepwiseMixer)]


@pytest.mark.parametrize("edit", [None, Edit()], ids=["fused", "stepwise"])
@pytest.mark.parametrize("spec", STEPWISE, ids=spec_id)
def test_stepwise_cells_keep_their_precision(spec: dict[str, Any], edit: Edit | None) -> None:
    """A stepwise cell runs in the dtype of its weights."""
    mixer = build_mixer(spec, torch.float32)
    x, state = torch.randn(2, 20, D_MODEL + 2, generator=generator(1)), mixer.init_state(2)
    expected = mixer(x, state, edit)
    with autocast():
        assert_trees_equal(mixer(x, state, edit), expected)
        assert_trees_equal(
            mixer(x.to(NARROW), state, edit), mixer(x.to(NARROW).float(), state, edit)
        )


def assert_splits_agree(model: Any, start: PyTree) -> None:
    tokens = random_tokens(2, TIME)
    like = [(name, leaf.dtype) for name, leaf in leaves(start)]
    with autocast():
        state = start
        for piece in tokens.split([30, 1, 1, 68], dim=1):
            state = model(piece, state).state
            assert [(name, leaf.dtype) for name, leaf in leaves(state)] == like
        whole = outcome(model, tokens, start, [TIME])
        for sizes in SPLITS:
            for name, tensor in outcome(model, tokens, start, sizes).items():
                assert_near(tensor, whole[name], TOLERANCE, f"{name} {sizes}")


def outcome(model: Any, tokens: Tensor, state: PyTree, sizes: Sequence[int]) -> dict[str, Tensor]:
    """Values, states and gradients; parameters share one scale, as each is a sum over tokens."""
    found = model_outcome(model, tokens, state, sizes)
    shared = [name for name in found if name.startswith("gradient of parameter")]
    together = torch.cat([found.pop(name).flatten() for name in shared])
    return {**found, "gradients of parameters": together}


@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_splits_of_every_cell(spec: dict[str, Any]) -> None:
    """Values, states, gradients and dtypes do not depend on the split."""
    model = build_model(spec, dtype=torch.float32)
    assert_splits_agree(model, random_state(model, 2))


@pytest.mark.parametrize(("spec", "mixer"), DEFINED, ids=spec_id)
def test_splits_of_every_mitigation(spec: dict[str, Any], mixer: dict[str, Any]) -> None:
    """The same holds under a mitigation, including its carry."""
    model = build_mitigated([spec], mixer, dtype=torch.float32)
    assert_splits_agree(model, random_start(model, 2))


@pytest.mark.parametrize("kind", ["mamba2", "lstm", "gru", "rnn"])
def test_a_state_may_enter_and_leave_autocast(kind: str) -> None:
    """A state made with autocast is valid without it, and the reverse."""
    model = build_model(kind, dtype=torch.float32)
    tokens = random_tokens(2, 20)
    with autocast():
        state = model(tokens).state
    state = model(tokens, state).state
    with autocast():
        after = model(tokens, state).state
    assert_trees_equal(random_tree(after, 1), random_tree(model.init_state(2), 1))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_a_float64_model_computes_in_float64(spec: dict[str, Any], wide: bool) -> None:
    """Autocast leaves products of float64 as they are."""
    model, tokens = build_model(spec, residual_in_fp32=wide), random_tokens(2, 20)
    expected = model(tokens).logits
    losses = model.token_losses(tokens[:, :-1], tokens[:, 1:])[0]
    with autocast():
        assert_near(model(tokens).logits, expected, 1e-12)
        assert_near(model.token_losses(tokens[:, :-1], tokens[:, 1:])[0], losses, 1e-12)
