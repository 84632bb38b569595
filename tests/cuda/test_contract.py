"""What holds on a CPU in float64 holds on a GPU: a check of an installation.

`pytest -m cuda` runs these tests and those that other files mark. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from longrnn.models.recompute import GRANULARITIES
from longrnn.ops.ssd import BACKENDS
from longrnn.ops.ssd.self_test import TOLERANCE as BACKEND_TOLERANCE
from longrnn.ops.ssd.self_test import self_test
from torch import Tensor

from longrnn.cells import MIXERS
from longrnn.diagnostics.jacobian import Step, spectrum
from longrnn.inference.engine import token_losses
from longrnn.models import LanguageModel, generate
from longrnn.state import clone, leaves, tree_map
from longrnn.training.objective import Objective
from tests.contracts.builders import (
    D_MODEL,
    DEFINED,
    MIXER_SPECS,
    POSITION_SPECS,
    VOCAB,
    assert_near,
    build_mitigated,
    build_mixer,
    build_model,
    generator,
    mixer_spec,
    random_start,
    random_state,
    random_tokens,
    random_tree,
    spec_id,
)

pytestmark = pytest.mark.cuda
GPU = torch.device("cuda")
# Relative to the largest entry. In bfloat16 weights and projections round to 8 bits; on a CPU the
# same models are up to 0.08 away.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.15}
# Prefill in two calls, the second from a carried state, and single tokens.
SPLIT = [150, 45, 1, 1]
# The backends that a GPU runs.
BACKENDS_THERE = [name for name in BACKENDS if name != "native"]


def to_gpu(tree: Any, dtype: torch.dtype) -> Any:
    """A tree of tensors on the GPU, real ones of float64 in `dtype`."""
    return tree_map(
        lambda leaf: leaf.to(GPU, dtype if leaf.dtype == torch.float64 else leaf.dtype), tree
    )


def outcome(model: Any, tokens: Tensor, state: Any) -> dict[str, Tensor]:
    """Logits of all pieces, final state and the gradients of all weights, on the CPU."""
    pieces, after = [], state
    for piece in tokens.split(SPLIT, dim=1):
        logits, after = model(piece, after)
        pieces.append(logits)
    logits = torch.cat(pieces, dim=1)
    weights = dict(model.named_parameters())
    loss = logits.double().square().mean()
    grads = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    gradients = torch.cat([one.flatten().double() for one in grads])
    real = {name: leaf for name, leaf in leaves(after.layers) if leaf.is_floating_point()}
    found = {"logits": logits, "gradients": gradients, **real}
    return {name: one.detach().cpu() for name, one in found.items()}


def assert_agrees(exact: Any, model: Any, exact_state: Any, state: Any, dtype: torch.dtype) -> None:
    """A model on the GPU in `dtype` gives what `exact` gives on the CPU in float64."""
    tokens = random_tokens(2, sum(SPLIT))
    wanted = outcome(exact, tokens, exact_state)
    found = outcome(model, tokens.to(GPU), state)
    for name, one in wanted.items():
        assert_near(found[name], one, TOLERANCE[dtype], name)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=spec_id)
@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_cells(spec: dict[str, Any], dtype: torch.dtype) -> None:
    """Logits, states and gradients of every cell, in pieces, from a carried state."""
    exact, model = build_model(spec), build_model(spec).to(dtype).to(GPU)
    start = random_state(exact, 2)
    state = tree_map(lambda leaf, like: leaf.to(GPU, like.dtype), start, model.init_state(2))
    assert_agrees(exact, model, start, state, dtype)


@pytest.mark.parametrize("backend", BACKENDS_THERE)
def test_backends(backend: str) -> None:
    """The error of values and gradients, in float32 and float64."""
    found = self_test(backend, GPU)
    assert found.passed, f"{found.error:.1e}, tolerances {BACKEND_TOLERANCE}"


@pytest.mark.parametrize("backend", BACKENDS_THERE)
def test_backends_in_a_model(backend: str) -> None:
    """Each backend in a Mamba-2."""
    spec = {**mixer_spec("mamba2"), "backend": backend}
    exact = build_model(mixer_spec("mamba2"))
    model = build_model(spec, dtype=torch.float32).to(GPU)
    start = random_state(exact, 2)
    assert_agrees(exact, model, start, to_gpu(start, torch.float32), torch.float32)


@pytest.mark.parametrize("spec", POSITION_SPECS, ids=spec_id)
def test_positions(spec: dict[str, Any]) -> None:
    """Every position encoding."""
    exact = build_model("gru", spec["kind"])
    model = build_model("gru", spec["kind"], dtype=torch.float32).to(GPU)
    start = exact.init_state(2)
    assert_agrees(exact, model, start, to_gpu(start, torch.float32), torch.float32)


@pytest.mark.parametrize(("spec", "mixer"), DEFINED, ids=spec_id)
def test_mitigations(spec: dict[str, Any], mixer: dict[str, Any]) -> None:
    """Every mitigation of every cell, in float64: a limit may act or not, by one rounding."""
    exact, model = build_mitigated([spec], mixer), build_mitigated([spec], mixer)
    model = model.to(GPU)
    start = random_start(exact, 2)
    assert_agrees(exact, model, start, to_gpu(start, torch.float64), torch.float64)


@pytest.mark.parametrize("every", [one for one in GRANULARITIES if one != "no"])
@pytest.mark.parametrize("kind", list(MIXERS))
def test_recomputation_gives_the_same_gradients(kind: str, every: str) -> None:
    """Gradients with and without recomputation have the same bits."""
    model = build_model(kind, dtype=torch.float32).to(GPU)
    tokens, state = random_tokens(2, sum(SPLIT)).to(GPU), model.init_state(2)
    plain = outcome(model, tokens, state)
    model.gradient_checkpointing_enable(every)
    for name, one in outcome(model, tokens, state).items():
        assert torch.equal(one, plain[name]), name


@pytest.mark.parametrize("kind", list(MIXERS))
def test_a_training_step_under_autocast(kind: str) -> None:
    """The state stays float32, and the loss is near that of the CPU in float64."""
    exact, model = build_model(kind), build_model(kind, dtype=torch.float32).to(GPU)
    tokens = random_tokens(2, 61)
    targets = tokens[:, 1:]
    wanted, _, _ = Objective(exact).token_losses(tokens[:, :-1], targets, exact.init_state(2))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        losses, _, state = Objective(model).token_losses(
            tokens[:, :-1].to(GPU), targets.to(GPU), model.init_state(2)
        )
        model(tokens.to(GPU)).logits.float().logsumexp(-1).mean().backward()
    assert_near(losses.cpu(), wanted, TOLERANCE[torch.bfloat16])
    assert all(leaf.dtype == torch.float32 for _, leaf in leaves(state.layers))
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())


def models() -> Iterator[Any]:
    """Plain and mitigated models."""
    for spec in MIXER_SPECS:
        yield pytest.param(lambda spec=spec: build_model(spec), id=spec_id(spec))
    for spec, mixer in DEFINED:
        name = f"{spec_id(spec)}-{spec_id(mixer)}"
        yield pytest.param(lambda s=spec, m=mixer: build_mitigated([s], m), id=name)


@torch.no_grad()
@pytest.mark.parametrize("build", list(models()))
def test_generation_and_evaluation(build: Any) -> None:
    """Greedy tokens, with and without a stop, and losses equal those of the CPU in float64."""
    exact: LanguageModel = build()
    model = build().to(GPU)
    prompt, long = random_tokens(2, 9), random_tokens(2, 200)
    for stop in ([], [[VOCAB + 1]]):
        wanted = generate(exact, prompt, max_new_tokens=20, stop=stop)
        found = generate(model, prompt.to(GPU), max_new_tokens=20, stop=stop)
        assert found.tokens == wanted.tokens
        assert found.state.position.tolist() == wanted.state.position.tolist()
    pairs = zip(token_losses(model, long), token_losses(exact, long), strict=True)
    for (start, nats), (place, expected) in pairs:
        assert start == place
        assert_near(nats, expected, 1e-9)


@torch.no_grad()
def test_states_are_values() -> None:
    """A kernel writes no state that it was given."""
    for kind in MIXERS:
        model = build_model(kind, dtype=torch.float32).to(GPU)
        state = random_tree(model.init_state(2).layers, 1)
        state = model.init_state(2)._replace(layers=to_gpu(state, torch.float32))
        given = clone(state)
        for time in (1, 7):
            model(random_tokens(2, time).to(GPU), state)
        for (name, ours), (_, theirs) in zip(leaves(state), leaves(given), strict=True):
            assert torch.equal(ours, theirs), (kind, name)


@pytest.mark.parametrize("kind", list(MIXERS))
def test_jacobians(kind: str) -> None:
    """The spectrum of a step."""
    exact, mixer = build_mixer(mixer_spec(kind)), build_mixer(mixer_spec(kind)).to(GPU)
    x = random_tree(torch.empty(1, 1, D_MODEL + 2, dtype=torch.float64), 0)
    state = random_tree(exact.init_state(1), 1)
    wanted = spectrum(Step(exact, x, state), generator(0))
    found = spectrum(Step(mixer, x.to(GPU), to_gpu(state, torch.float64)), generator(0))
    assert found.radius == pytest.approx(wanted.radius, rel=1e-8)
    assert found.singular == pytest.approx(wanted.singular, rel=1e-8, abs=1e-12)


def test_a_padded_and_packed_batch() -> None:
    """Documents and padding, in every cell."""
    tokens = random_tokens(2, 40)
    is_token = torch.ones_like(tokens, dtype=torch.bool)
    starts = torch.zeros_like(is_token)
    is_token[0, 30:], starts[:, 0], starts[1, 17] = False, True, True
    masks = {"is_token": is_token, "is_document_start": starts}
    for kind in MIXERS:
        exact, model = build_model(kind), build_model(kind).to(GPU)
        found = model(tokens.to(GPU), **{name: mask.to(GPU) for name, mask in masks.items()})
        assert_near(found.logits.detach().cpu(), exact(tokens, **masks).logits.detach(), 1e-9)
