"""What a user does with a model gives the same on every device: train, evaluate, save, diagnose."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from longrnn.ops.ssd import BACKENDS, PARTIAL, mamba_ssm, resolve
from longrnn.ops.ssd.self_test import self_test
from longrnn.training.prefetch import Prefetch

from longrnn import load, state
from longrnn.cells import MIXERS
from longrnn.cells.self_test import layer_self_test
from longrnn.data import Batch
from longrnn.diagnostics.through_time import Run, norms
from longrnn.evaluation.perplexity import evaluate
from longrnn.evaluation.texts import Document
from longrnn.models import LanguageModel
from longrnn.state import tree_map
from longrnn.studies.stability import stability
from longrnn.training.objective import Objective
from longrnn.training.trainer import Trainer
from tests.contracts.builders import (
    assert_near,
    assert_trees_equal,
    build_mitigated,
    build_model,
    generator,
    mitigation_spec,
    random_tokens,
)
from tests.training.runs import metrics, tiny

STEPS = 4


def trainer_of(folder: Path, *, resume: bool = False, **changes: Any) -> Trainer:
    how = {"logging_steps": 1, "max_steps": STEPS, "warmup_steps": 1, **changes}
    how |= {"lr_scheduler_type": "constant"}
    return Trainer(tiny("carry", folder, **how), resume=resume, quiet=True)


def exact_loss(trainer: Trainer) -> float:
    """The loss of the next step, on a CPU in float64."""
    objective = Objective(copy.deepcopy(trainer.model).cpu().double())
    losses = []
    for micro in range(trainer.config.gradient_accumulation_steps):
        segments, start = trainer.micro_batch(micro)
        start = tree_map(
            lambda leaf: leaf.cpu().double() if leaf.is_floating_point() else leaf.cpu(), start
        )
        segments = [batch.to(torch.device("cpu")) for batch in segments]
        losses.append(float(objective(segments, start).loss.detach()))
    return sum(losses) / len(losses)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 2e-2)])
def test_a_run_of_training(
    precision: str, tolerance: float, default_device: torch.device, tmp_path: Path
) -> None:
    """Its first loss is that of a CPU in float64, and its rows have the speed and memory."""
    trainer = trainer_of(tmp_path / "run", mixed_precision=precision)
    wanted = exact_loss(trainer)
    trained = trainer.train()
    assert {one.device.type for one in trained.parameters()} == {default_device.type}
    assert {one.dtype for one in trained.parameters()} == {torch.float32}
    rows = read_lines(tmp_path / "run/metrics.jsonl")
    assert len(rows) == STEPS
    assert rows[0]["loss"] == pytest.approx(wanted, rel=tolerance)
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert ("peak_memory_gib" in row) == (default_device.type == "cuda")


def test_a_run_is_resumed(default_device: torch.device, tmp_path: Path) -> None:
    """With weights, moments and carried states, which are saved from the device."""
    trainer_of(tmp_path / "whole").train()
    trainer_of(tmp_path / "parts", max_steps=2).train()
    trainer_of(tmp_path / "parts", resume=True).train()
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert [row["loss"] for row in parts] == pytest.approx([row["loss"] for row in whole], rel=1e-5)
    moved = load(str(tmp_path / "parts"), device=str(default_device))
    tokens = random_tokens(1, 40)
    with torch.no_grad():
        assert_near(
            moved(tokens.to(default_device)).logits.cpu(),
            load(str(tmp_path / "parts"), device="cpu")(tokens).logits,
            1e-5,
        )


def test_batches_for_a_gpu_are_page_locked(device: torch.device) -> None:
    """They are copied to it while it computes."""

    def make(step: int, micro: int) -> list[Batch]:
        tokens = torch.full((2, 50), step)
        return [Batch(tokens, tokens, torch.ones(2, dtype=torch.bool), is_token=tokens >= 0)]

    ahead = Prefetch(make, 1, 3, device)
    for step in range(3):
        (batch,) = ahead.segments(step, 0)
        assert batch.tokens.is_pinned() == batch.targets.is_pinned() == (device.type == "cuda")
        moved = batch.to(device)
        assert moved.tokens.device.type == device.type
        assert moved.tokens.tolist() == [[step] * 50] * 2
    ahead.close()


BUILDS = {
    **{kind: lambda kind=kind: build_model(kind) for kind in MIXERS},
    "window": lambda: build_mitigated([mitigation_spec("sliding_window")]),
    "norm": lambda: build_mitigated([mitigation_spec("state_norm")], "lstm"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", BUILDS)
def test_a_state_is_saved_on_one_device_and_loaded_on_another(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    """Its model is recognised on both, and each has the same bits."""
    model, there = BUILDS[name](), BUILDS[name]().to(device)
    after = there(random_tokens(2, 20).to(device)).state
    state.save(after, tmp_path / "state", model=there)
    on_cpu, back = (state.load(tmp_path / "state", like=one) for one in (model, there))
    for loaded, where in ((on_cpu, "cpu"), (back, device.type)):
        assert {leaf.device.type for _, leaf in state.leaves(loaded)} == {where}
        assert_trees_equal(tree_map(torch.Tensor.cpu, loaded), tree_map(torch.Tensor.cpu, after))
    more = random_tokens(2, 3, seed=1)
    assert_near(there(more.to(device), back).logits.cpu(), model(more, on_cpu).logits, 1e-9)


def perplexities(model: LanguageModel, output: Path) -> list[float]:
    documents = [Document("a.txt", "1", random_tokens(1, 400, 1)[0])]
    rows = evaluate(model, documents, length=150, output=output, batch_size=2, quiet=True)
    return [value for row in rows for value in row["buckets"]]


@pytest.mark.parametrize("name", BUILDS)
def test_an_evaluation(name: str, device: torch.device, tmp_path: Path) -> None:
    """The losses of windows of a text."""
    wanted = perplexities(BUILDS[name](), tmp_path / "cpu.jsonl")
    found = perplexities(BUILDS[name]().to(device), tmp_path / "device.jsonl")
    assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("kind", MIXERS)
def test_gradients_of_a_model_in_eval_mode(kind: str, device: torch.device) -> None:
    """Stability of gradients and their norms through time; cuDNN refuses cells in eval mode."""
    model, there = (build_model(kind).eval().to(where) for where in ("cpu", device))
    inputs = torch.randint(model.vocab_size, (3, 3, 6), generator=generator(0))
    for ours, exact in zip(stability(there, inputs), stability(model, inputs), strict=True):
        assert_near(ours.cpu(), exact, 1e-8)
    tokens, targets = random_tokens(2, 12), random_tokens(1, 2, seed=1)[0]
    wanted = norms(Run(model, tokens), targets)
    found = norms(Run(there, tokens.to(device)), targets.to(device))
    for ours, exact in zip(found, wanted, strict=True):
        assert ours["norm"] == pytest.approx(exact["norm"], rel=1e-8)


@pytest.mark.parametrize("backend", ["chunked", "native", "reference"])
def test_a_layer_of_each_backend(backend: str, device: torch.device) -> None:
    """The check of `longrnn doctor`: many tokens, a single one, and all gradients."""
    if (backend, device.type) == ("native", "cuda") or backend not in BACKENDS:
        pytest.skip(f"{backend} has no kernels for this device")
    found = layer_self_test(backend, device)
    assert found.passed, f"{found.error:.1e}"


@pytest.mark.cuda
@pytest.mark.parametrize("backend", PARTIAL)
def test_backends_of_other_packages(backend: str) -> None:
    """Where they are installed: with their own rounding of float32 factors to 11 bits."""
    if (why := mamba_ssm.missing("cuda")) is not None:
        pytest.skip(why)
    for found in (self_test(backend, "cuda"), layer_self_test(backend, "cuda")):
        assert found.passed, f"{found.error:.1e}"


def test_auto_selects_the_backend_of_the_device(device: torch.device) -> None:
    """And the model says so."""
    model = build_model("mamba2").to(device)
    expected = resolve("auto", device.type)
    assert f"backend={expected}" in repr(model)
    if device.type == "cuda":
        assert expected == "chunked"
