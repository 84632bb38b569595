"""What holds on a CPU in float64 holds on a GPU: a check of an installation.

`pytest -m cuda` runs these tests and those that other files mark.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import state as states
from longrnn.cells import MIXERS
from longrnn.inference.engine import token_losses
from longrnn.models import Rows, generate
from longrnn.state import clone, leaves, tree_map
from longrnn.training.batches import segments
from longrnn.training.config import TrainConfig
from longrnn.training.distributed import build_accelerator
from longrnn.training.objective import Objective
from longrnn.training.trainer import Trainer
from tests.contracts.builders import (
    MIXER_SPECS,
    Spec,
    assert_near,
    assert_trees_equal,
    build_model,
    generator,
    random_tokens,
    random_tree,
    spec_id,
)
from tests.contracts.subjects import SUBJECTS, outcome, random_masks, read, started
from tests.training.runs import metrics, tiny, train

pytestmark = pytest.mark.cuda
CPU, GPU = torch.device("cpu"), torch.device("cuda")
# Relative to the largest entry. In bfloat16 weights and projections round to 8 bits; on a CPU the
# same models are up to 0.08 away.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.15}
# Prefill in two calls, the second from a carried state, and single tokens.
SPLIT = [150, 45, 1, 1]
THERE = {name: one for name, one in SUBJECTS.items() if one.mixer.get("backend") != "cpu"}
every_subject = pytest.mark.parametrize("subject", THERE.values(), ids=THERE)


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
    """In eval mode, in which cuDNN would have no gradients."""
    assert_agrees(build_model(spec), build_model(spec).to(dtype).to(GPU).eval(), dtype)


@torch.no_grad()
@every_subject
def test_generation_evaluation_and_packing(subject: Any) -> None:
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
    there = tree_map(lambda leaf: leaf.to(GPU), state)
    given = clone(there)
    logits, _ = read(exact, long[:, :40], state, [40], masks)
    ours = model(long[:, :40].to(GPU), there, rows=Rows(*(one.to(GPU) for one in masks))).logits
    assert_near(ours.cpu(), logits, 1e-9)
    assert_trees_equal(there, given)


@pytest.mark.parametrize("kind", list(MIXERS))
def test_float32_cells_are_not_rounded_to_tf32(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN would round the factors of products to 11 bits, an error of some 1e-4 at this width."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    if hasattr(torch.backends.cudnn, "rnn"):
        monkeypatch.setattr(torch.backends.cudnn, "fp32_precision", "tf32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mixer = MIXERS.build({"kind": kind}, 128, 128).double()
    x = torch.randn(2, 20, 128, generator=generator(0), dtype=torch.float64)
    start = random_tree(mixer.init_state(2), 1)

    def outcome(dtype: torch.dtype, where: torch.device) -> list[Tensor]:
        cell = mixer.to(where, dtype)
        state = tree_map(lambda leaf: leaf.to(where, dtype), start)
        y, after = cell(x.to(where, dtype), state)
        gradients = torch.autograd.grad(y.square().sum(), list(cell.parameters()))
        return [one.detach().cpu() for one in (y, *(leaf for _, leaf in leaves(after)), *gradients)]

    wanted = outcome(torch.float64, CPU)
    for ours, exact in zip(outcome(torch.float32, GPU), wanted, strict=True):
        assert_near(ours, exact, 3e-5)


STEPS = 4


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    how = {"logging_steps": 1, "max_steps": STEPS, "warmup_steps": 1, **changes}
    return tiny("carry", folder, lr_scheduler_type="constant", **how)


def exact_loss(config: TrainConfig) -> float:
    """The loss of the first step, on a CPU in float64."""
    trainer = Trainer(config, build_accelerator(config), quiet=True)
    objective = Objective(copy.deepcopy(trainer.model).cpu().double())
    losses = []
    for micro in range(config.gradient_accumulation_steps):
        batches = segments(trainer.task, config, 0, micro)
        start = objective.model.init_state(len(batches[0].begins))
        losses.append(float(objective(batches, start).loss.detach()))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 2e-2)])
def test_a_run_of_training(precision: str, tolerance: float, tmp_path: Path) -> None:
    config = config_of(tmp_path / "whole", mixed_precision=precision)
    rows = train(config).rows
    assert rows[0]["loss"] == pytest.approx(exact_loss(config), rel=tolerance)
    assert all(row["tokens_per_second"] > 0 for row in rows)
    train(config_of(tmp_path / "parts", mixed_precision=precision, max_steps=2))
    train(config_of(tmp_path / "parts", mixed_precision=precision), resume=True)
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert [row["loss"] for row in parts] == pytest.approx([row["loss"] for row in whole], rel=1e-5)


@torch.no_grad()
@every_subject
def test_a_state_is_saved_on_one_device_and_loaded_on_another(subject: Any, tmp_path: Path) -> None:
    model, there = subject.build(), subject.build().to(GPU)
    after = there(random_tokens(2, 20).to(GPU)).state
    states.save(after, tmp_path / "state", model=there)
    for one, where in ((model, CPU), (there, GPU)):
        loaded = states.load(tmp_path / "state", one)
        assert {leaf.device.type for _, leaf in leaves(loaded)} == {where.type}
        assert_trees_equal(tree_map(Tensor.cpu, loaded), tree_map(Tensor.cpu, after))
