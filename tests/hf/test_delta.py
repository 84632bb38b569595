"""Gated DeltaNet hybrids: statistics, norms and retention of their state matrices."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from typer.testing import CliRunner

from longrnn.cli.app import app
from longrnn.diagnostics.record import Measurement, read
from longrnn.errors import UserError
from longrnn.hf.adapter import HFLanguageModel
from longrnn.hf.delta import FAMILIES, RULES, DeltaWatch, gate_norm_output
from longrnn.mitigations import Mitigated, mitigation
from longrnn.state import LMState
from tests.contracts.builders import assert_near
from tests.hf.architectures import architecture
from tests.hf.foreign import tokens, with_bytes

KINDS = sorted(FAMILIES)
TIME, FIRST = 70, 9  # more than one chunk of 64 tokens


def opened(kind: str) -> HFLanguageModel:
    """A tiny model that forgets slowly, so that something is left after TIME tokens."""
    model = HFLanguageModel(architecture(kind))
    with torch.no_grad():
        for layer in DeltaWatch(model).layers:
            layer.A_log.fill_(-4.0)
    return model


def measured(model: HFLanguageModel, text: Tensor, stops: list[int]) -> list[Measurement]:
    return list(read(model, text, stops, first=FIRST))


def with_first_matrix(state: LMState, number: int, matrix: Tensor) -> LMState:
    """The state with another matrix in one layer."""
    layers = list(state.layers)
    conv = layers[number].conv
    layers[number] = layers[number]._replace(conv=conv, recurrent=(matrix,))
    return state._replace(layers=tuple(layers))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_of_a_state_is_what_a_changed_state_leaves(kind: str) -> None:
    """The first layer is linear in its matrix: a random one is added after FIRST tokens, and what
    it changes at the end is the recorded product of transition matrices times it."""
    model, text = opened(kind), tokens(2, TIME, seed=5) % 60
    watch = DeltaWatch(model)
    number = watch.numbers[0]
    start = model(text[:, :FIRST]).state
    plain = model(text[:, FIRST:], start).state
    matrix = watch.states(start)[0]
    added = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(0))
    changed = model(text[:, FIRST:], with_first_matrix(start, number, matrix + added)).state
    with watch:
        state = model(text[:, :FIRST]).state
        watch.mark()
        for piece in text[:, FIRST:].split([1, 20, 40], dim=1):
            state = model(piece, state).state
    transfer = watch.transfers[0]
    assert transfer is not None
    left = watch.states(changed)[0] - watch.states(plain)[0]
    assert_near(transfer.recent @ added, left, 1e-4)
    assert transfer.total.norm() < transfer.recent.norm()
    assert_near(watch.states(state)[0], watch.states(plain)[0], 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_the_states(kind: str) -> None:
    """Norms, means and channels of every layer; the loss is that of the logits, and the functions
    of transformers are restored."""
    model, text = opened(kind), tokens(2, TIME + 1, seed=6) % 60
    module = sys.modules[type(DeltaWatch(model).layers[0]).__module__]
    rules = [getattr(module, name) for name in RULES]
    *_, last = measured(model, text[:, :-1], [4, 40, TIME])
    assert [getattr(module, name) for name in RULES] == rules
    watch = DeltaWatch(model)
    outputs: list[Tensor] = []
    channels: list[Tensor] = []
    layer = watch.layers[0]
    handles = [
        layer.register_forward_hook(lambda _, __, y: outputs.append(y)),
        gate_norm_output(layer).register_forward_pre_hook(lambda _, x: channels.append(x[0])),
    ]
    after = model(text[:, :-1])
    for handle in handles:
        handle.remove()
    for found, matrix in zip(last.heads, watch.states(after.state), strict=True):
        entries = matrix.double().flatten(2)
        assert_near(found.norm, entries.norm(dim=-1), 1e-5)
        assert_near(found.mean, entries.mean(-1), 1e-4)
        assert_near(found.variance, entries.var(dim=-1, correction=0), 1e-4)
        assert found.retention is not None
        assert bool(((found.retention >= 0) & (found.retention <= 1)).all())
    for found, matrix in zip(last.channels, watch.states(after.state), strict=True):
        rms = matrix.double().square().mean(-2).sqrt()  # (b, h, d_v)
        assert_near(found.rms, rms, 1e-4)
    whole = measured(model, text[:, :-1], [TIME])[0]
    assert_near(whole.heads[0].output_norm, outputs[0].double().norm(dim=-1).mean(1), 1e-4)
    energy = channels[0].double().square().mean(1)
    assert_near(whole.channels[0].energy.flatten(1), energy, 1e-4)
    nats = torch.nn.functional.cross_entropy(
        after.logits[:, :-1].transpose(1, 2), text[:, 1:-1], reduction="none"
    )
    assert_near(whole.loss, nats.double().mean(1), 1e-5)


@pytest.mark.parametrize("kind", ["qwen3_next", "olmo_hybrid"])
def test_shares_of_the_first_tokens_and_retention_follow_the_definition(kind: str) -> None:
    """A loop over tokens multiplies the transition matrices of every layer, from the arguments that
    the layers give to the rule, in float64."""
    model, text = opened(kind), tokens(2, TIME, seed=7) % 60
    watch = DeltaWatch(model)
    module = sys.modules[type(watch.layers[0]).__module__]
    rule, seen = module.torch_chunk_gated_delta_rule, []  # type: ignore[attr-defined]

    def keep(query: Any, key: Any, value: Any, **options: Any) -> Any:
        seen.append((key, options["g"], options["beta"]))
        return rule(query, key, value, **options)

    module.torch_chunk_gated_delta_rule = keep  # type: ignore[attr-defined]
    try:
        after = model(text).state
    finally:
        module.torch_chunk_gated_delta_rule = rule  # type: ignore[attr-defined]
    first = watch.states(model(text[:, :FIRST]).state)
    (found,) = measured(model, text, [TIME])
    for layer, (key, g, beta) in enumerate(seen):
        heads = g.shape[-1]
        squares = key.double().square().sum(-1, keepdim=True)
        unit = key.double() * (squares + 1e-6).rsqrt()  # as transformers normalises keys
        unit = unit.repeat_interleave(heads // key.shape[2], dim=2)
        eye = torch.eye(unit.shape[-1], dtype=torch.float64)
        total = eye.expand(2, heads, -1, -1)
        recent = total
        for t in range(TIME):
            k = unit[:, t]
            outer = beta[:, t, :, None, None] * k[..., :, None] * k[..., None, :]
            step = g[:, t].double().exp()[..., None, None] * (eye - outer)
            total = step @ total
            recent = step @ recent if t >= FIRST else recent
        retention = total.flatten(2).norm(dim=-1) / eye.shape[0] ** 0.5
        kept, share = found.heads[layer].retention, found.heads[layer].first_share
        assert kept is not None
        assert share is not None
        assert_near(kept, retention, 1e-4)
        left = (recent @ first[layer].double()).flatten(2).norm(dim=-1)
        norm = watch.states(after)[layer].double().flatten(2).norm(dim=-1)
        assert_near(share, left / norm, 1e-4)


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(one) for one in arguments])


@pytest.mark.parametrize(
    "kind", ["qwen3_next", pytest.param("olmo_hybrid", marks=pytest.mark.slow)]
)
def test_the_command_writes_the_report_and_refuses_mitigations(tmp_path: Path, kind: str) -> None:
    theirs = architecture(kind, vocab_size=256, max_position_embeddings=512)
    folder, text = with_bytes(theirs, tmp_path / "hybrid"), tmp_path / "book.txt"
    text.write_text("The grass is green. The sky is blue. The sun is yellow. " * 8)
    options = ["--text", text, "--train-length", 64, "--length", 200, "--every", 16, "--quiet"]
    options += ["--first", 16, "--output", tmp_path / "out"]
    done = run("diagnose", "states", folder, *options)
    assert done.exit_code == 0, done.output
    report = (tmp_path / "out/report.html").read_text()
    assert "<img" in report or "<svg" in report
    rows = [json.loads(line) for line in (tmp_path / "out/states.jsonl").read_text().splitlines()]
    assert {row["head"] for row in rows} == set(range(4))
    assert all(row["retention"] is not None and row["norm"] > 0 for row in rows)
    found = yaml.safe_load((tmp_path / "out/diagnosis.yaml").read_text())
    assert found["train_length"] == 64
    refused = run("diagnose", "states", f"{folder}+state_norm(threshold=1)", *options)
    assert isinstance(refused.exception, UserError)
    assert kind in str(refused.exception)


def test_a_model_without_recurrent_layers_is_refused(tmp_path: Path) -> None:
    model = HFLanguageModel(architecture("llama"))
    with pytest.raises(UserError, match="llama"):
        list(read(model, tokens(1, 8) % 60, [8], first=4))
    with pytest.raises(UserError):
        Mitigated(model, mitigation("state_norm(threshold=1)"))  # type: ignore[arg-type]
