"""What holds on a CPU in float64 holds on a GPU: a check of an installation.

`pytest -m cuda` runs these tests and those that other files mark.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.cells import MIXERS
from longrnn.cells.self_test import self_test
from longrnn.diagnostics.jacobian import Step, spectrum
from longrnn.inference.engine import token_losses
from longrnn.models import Rows, generate
from longrnn.models.recurrent import GRANULARITIES
from longrnn.ops.backend import REFUSALS
from longrnn.state import clone, leaves, tree_map
from longrnn.training.objective import Objective
from tests.contracts.builders import (
    D_MODEL,
    MIXER_SPECS,
    Spec,
    assert_near,
    assert_trees_equal,
    build_mixer,
    build_model,
    mixer_spec,
    random_tokens,
    random_tree,
    spec_id,
)
from tests.contracts.subjects import SUBJECTS, outcome, random_masks, read, started

pytestmark = pytest.mark.cuda
GPU = torch.device("cuda")
# Relative to the largest entry. In bfloat16 weights and projections round to 8 bits; on a CPU the
# same models are up to 0.08 away.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.15}
# Prefill in two calls, the second from a carried state, and single tokens.
SPLIT = [150, 45, 1, 1]
THERE = {name: one for name, one in SUBJECTS.items() if one.mixer.get("backend") != "cpu"}
every_subject = pytest.mark.parametrize("subject", THERE.values(), ids=THERE)


def to_gpu(tree: Any, dtype: torch.dtype = torch.float64) -> Any:
    """A tree of tensors on the GPU, real ones of float64 in `dtype`."""
    return tree_map(
        lambda leaf: leaf.to(GPU, dtype if leaf.dtype == torch.float64 else leaf.dtype), tree
    )


def assert_agrees(exact: Any, model: Any, dtype: torch.dtype) -> None:
    """Values, states and gradients of a model on the GPU are those of `exact` on the CPU."""
    tokens, start = random_tokens(2, sum(SPLIT)), started(exact, 2)
    like = model.init_state(2)
    state = tree_map(lambda leaf, own: leaf.to(GPU, own.dtype), start, like)
    wanted = outcome(exact, tokens, start, SPLIT)
    found = outcome(model, tokens.to(GPU), state, SPLIT)
    scale = max(one.abs().max().item() for n, one in wanted.items() if "parameter" in n)
    for name, one in wanted.items():
        shared = scale if "parameter" in name else 0.0
        assert_near(found[name].cpu(), one, TOLERANCE[dtype], name, shared)


@every_subject
def test_every_subject(subject: Any) -> None:
    """In float64, because a limit may act or not, by one rounding."""
    assert_agrees(subject.build(), subject.build().to(GPU), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=spec_id)
@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_cells(spec: Spec, dtype: torch.dtype) -> None:
    assert_agrees(build_model(spec), build_model(spec).to(dtype).to(GPU), dtype)


@pytest.mark.parametrize("backend", ["torch", *REFUSALS])
def test_backends(backend: str) -> None:
    """The check of `longrnn doctor`: many tokens, a single one, and all gradients."""
    if backend in REFUSALS and (why := REFUSALS[backend]([torch.ones(1, device=GPU)])):
        pytest.skip(why)
    found = self_test(backend, GPU)
    assert found.passed, f"{found.error:.1e}"


@pytest.mark.parametrize("every", [one for one in GRANULARITIES if one != "no"])
@pytest.mark.parametrize("kind", list(MIXERS))
def test_recomputation_gives_the_same_gradients(kind: str, every: str) -> None:
    """Bit for bit."""
    model = build_model(kind, dtype=torch.float32).to(GPU)
    tokens, state = random_tokens(2, sum(SPLIT)).to(GPU), model.init_state(2)
    plain = outcome(model, tokens, state, SPLIT)
    model.gradient_checkpointing_enable(every)
    assert_trees_equal(list(outcome(model, tokens, state, SPLIT).values()), list(plain.values()))


@pytest.mark.parametrize("kind", list(MIXERS))
def test_a_training_step_under_autocast(kind: str) -> None:
    """The state stays float32, and the loss is near that of the CPU in float64."""
    exact, model = build_model(kind), build_model(kind, dtype=torch.float32).to(GPU)
    tokens = random_tokens(2, 61)
    given = tokens[:, :-1], tokens[:, 1:]
    wanted, _, _ = Objective(exact).token_losses(*given, exact.init_state(2))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        inputs, targets = (one.to(GPU) for one in given)
        losses, _, state = Objective(model).token_losses(inputs, targets, model.init_state(2))
        model(tokens.to(GPU)).logits.float().logsumexp(-1).mean().backward()
    assert_near(losses.cpu(), wanted, TOLERANCE[torch.bfloat16])
    assert all(leaf.dtype == torch.float32 for _, leaf in leaves(state.layers))
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())


@torch.no_grad()
@every_subject
def test_generation_evaluation_and_packing(subject: Any) -> None:
    """Greedy tokens, losses, and packed rows equal those of the CPU; states are not changed."""
    exact, model = subject.build(), subject.build().to(GPU)
    prompt, long = random_tokens(2, 9), random_tokens(2, 200)
    wanted = generate(exact, prompt, max_new_tokens=20)
    found = generate(model, prompt.to(GPU), max_new_tokens=20)
    assert found.tokens == wanted.tokens
    assert_trees_equal(found.state.position.cpu(), wanted.state.position)
    pairs = zip(token_losses(model, long), token_losses(exact, long), strict=True)
    for (start, nats), (place, expected) in pairs:
        assert start == place
        assert_near(nats, expected, 1e-9)
    masks = random_masks(2, 40)
    state = started(exact, 2)
    there = to_gpu(state)
    given = clone(there)
    logits, _ = read(exact, long[:, :40], state, [40], masks)
    ours = model(long[:, :40].to(GPU), there, rows=Rows(*(one.to(GPU) for one in masks))).logits
    assert_near(ours.cpu(), logits, 1e-9)
    assert_trees_equal(there, given)


@pytest.mark.parametrize("kind", list(MIXERS))
def test_jacobians(kind: str) -> None:
    """The spectrum of a step."""
    exact, mixer = build_mixer(mixer_spec(kind)), build_mixer(mixer_spec(kind)).to(GPU)
    x: Tensor = random_tree(torch.empty(1, 1, D_MODEL + 2, dtype=torch.float64), 0)
    state = random_tree(exact.init_state(1), 1)
    wanted = spectrum(Step(exact, x, state))
    found = spectrum(Step(mixer, x.to(GPU), to_gpu(state)))
    assert found.radius == pytest.approx(wanted.radius, rel=1e-8)
    assert found.singular == pytest.approx(wanted.singular, rel=1e-8, abs=1e-12)
