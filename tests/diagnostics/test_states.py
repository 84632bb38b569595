"""State statistics equal those of a loop over tokens, and constructed heads collapse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from longrnn.cells import GRU, LSTM, MIXERS, RNN, Mamba2
from longrnn.diagnostics import record, states
from longrnn.diagnostics.record import HeadStatistics, read
from longrnn.diagnostics.states import Diagnosis, Prompt, diagnose, newlines, text_prompt
from longrnn.errors import UserError
from longrnn.evaluation.texts import Document
from longrnn.mitigations import Mitigated, mitigation
from longrnn.models import RecurrentLM
from longrnn.text import ByteTokenizer
from tests.contracts.builders import assert_near, build_model, random_tokens
from tests.refusals import naming

TIME, FIRST = 90, 20


class Loop:
    """Processes one token after another, keeps everything and edits nothing."""

    def __init__(self, model: RecurrentLM, tokens: Tensor) -> None:
        self.kind = model.config.mixer["kind"]
        self.cells = model.cells
        self.inputs: list[list[Tensor]] = [[] for _ in model.cells]  # (b, d) a token
        self.outputs: list[list[Tensor]] = [[] for _ in model.cells]
        handles = [
            mixer.register_forward_hook(self.keep(layer)) for layer, mixer in enumerate(self.cells)
        ]
        state = model.init_state(len(tokens))
        self.states = [state]
        with torch.no_grad():
            for token in tokens.split(1, dim=1):
                state = model(token, state).state
                self.states.append(state)
        for handle in handles:
            handle.remove()

    def keep(self, layer: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: Any) -> None:
            self.inputs[layer].append(arguments[0][:, 0])
            self.outputs[layer].append(output[0][:, 0])

        return hook

    def memory(self, layer: int, time: int) -> Tensor:
        """Return the states, `(b, heads, entries)`."""
        state = self.states[time].layers[layer]
        if self.kind == "mamba2":
            return state.ssm.flatten(2)
        return (state.c if self.kind == "lstm" else state.h)[:, None]

    def decay(self, layer: int, start: int, stop: int) -> Tensor:
        """Return the retention from `start` to `stop` tokens, `(b, heads, 1 or entries)`."""
        product = torch.ones(())
        for time in range(start, stop):
            product = product * self.gate(layer, time)
        return product

    def gate(self, layer: int, time: int) -> Tensor:
        """Return the decay of the token at `time`, from the equations of the cell."""
        x, mixer = self.inputs[layer][time], self.cells[layer]
        if isinstance(mixer, Mamba2):
            raw = x @ mixer.in_proj.weight.T[:, -mixer.n_heads :] + mixer.dt_bias
            dt = torch.log(1 + raw.exp())
            return (-mixer.A_log.exp() * dt).exp()[..., None]
        assert isinstance(mixer, (GRU, LSTM))
        w_ih, w_hh, b_ih, b_hh = mixer.cell.all_weights[0]
        gates = x @ w_ih.T + b_ih + self.states[time].layers[layer].h @ w_hh.T + b_hh
        d = mixer.d_model
        return torch.sigmoid(gates[:, d : 2 * d])[:, None]  # f of an LSTM, z of a GRU


def readings(model: Any, tokens: Tensor, stops: list[int]) -> dict[int, list[HeadStatistics]]:
    return {m.position: m.heads for m in read(model, tokens, stops, first=FIRST)}


@pytest.mark.parametrize("mixer", list(MIXERS))
def test_against_a_loop(mixer: str) -> None:
    """Every statistic equals that of the loop, and no hook remains."""
    model, tokens = build_model(mixer), random_tokens(3, TIME)
    loop = Loop(model, tokens)
    stops = [7, FIRST, 33, TIME]
    found = readings(model, tokens, stops)
    assert list(found) == stops
    for layer in range(2):
        before = 0
        for stop in stops:
            reading, memory = found[stop][layer], loop.memory(layer, stop)
            n = memory.shape[-1]
            mean = memory.sum(-1) / n
            norm = memory.square().sum(-1).sqrt()
            assert_near(reading.mean, mean, 1e-10, "mean")
            assert_near(reading.norm, norm, 1e-10, "norm")
            spread = (memory - mean[..., None]).square().sum(-1) / n
            assert_near(reading.variance, spread, 1e-10, "variance")
            outputs = loop.outputs[layer][before:stop]
            lengths = torch.stack([y.square().sum(-1).sqrt() for y in outputs])
            assert_near(reading.output_norm, lengths.mean(0), 1e-10, "output norm")
            before = stop
            if mixer == "rnn":
                assert reading.retention is None
                assert reading.first_share is None
                continue
            assert reading.retention is not None
            assert reading.first_share is not None
            kept = loop.decay(layer, 0, stop).mean(-1)
            assert_near(reading.retention, kept.expand_as(norm), 1e-9, "retention")
            if stop <= FIRST:
                assert torch.equal(reading.first_share, torch.ones_like(norm))
                continue
            left = loop.memory(layer, FIRST) * loop.decay(layer, FIRST, stop)
            share = left.square().sum(-1).sqrt() / norm
            assert_near(reading.first_share, share, 1e-9, "first share")
    assert not any(mixer._forward_hooks for mixer in model.cells)


def test_the_first_share_is_what_the_first_tokens_left() -> None:
    """The contribution of the first tokens is what the state loses without them."""
    model, tokens = build_model("mamba2", n_layers=1), random_tokens(2, TIME)
    ((reading,),) = readings(model, tokens, [TIME]).values()
    with torch.no_grad():
        state = model(tokens[:, :FIRST]).state
        whole = model(tokens[:, FIRST:], state).state.layers[0].ssm
        (layer,) = state.layers
        without = layer._replace(ssm=torch.zeros_like(layer.ssm))
        rest = model(tokens[:, FIRST:], state._replace(layers=(without,))).state.layers[0].ssm
    expected = (whole - rest).flatten(2).norm(dim=-1) / whole.flatten(2).norm(dim=-1)
    assert reading.first_share is not None
    assert_near(reading.first_share, expected, 1e-9)


def test_pieces_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts are read in pieces whose logits are bounded."""
    model, tokens, calls = build_model("mamba2", dtype=torch.float32), random_tokens(1, 500), []
    stops = list(range(50, 501, 50))
    expected = [m.loss for m in read(model, tokens, stops, first=FIRST)]
    hidden = RecurrentLM.hidden

    def noting(self: RecurrentLM, tokens: Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(tokens.shape[1])
        return hidden(self, tokens, *rest, **options)

    monkeypatch.setattr(RecurrentLM, "hidden", noting)
    monkeypatch.setattr(record, "scored_tokens", lambda rows, vocab_size: 20)
    found = [m.loss for m in read(model, tokens, stops, first=FIRST)]
    assert calls == [20, 20, 10, *[20, 20, 10] * 9]
    assert_near(torch.stack(found), torch.stack(expected), 1e-6)


@pytest.mark.parametrize("mixer", ["mamba2", "gru", "lstm"])
def test_under_a_mitigation(mixer: str) -> None:
    """Decays include the mitigation, and retention is None where it is not defined."""
    model, tokens = build_model(mixer), random_tokens(2, TIME)
    ((plain, _),) = readings(model, tokens, [TIME]).values()
    forgetful = Mitigated(model, mitigation("forget_more(decay_scale=0.9, input_scale=1)"))
    ((reading, _),) = readings(forgetful, tokens, [TIME]).values()
    assert plain.retention is not None
    assert reading.retention is not None
    if mixer == "mamba2":  # its gates do not depend on its state
        assert_near(reading.retention, plain.retention * 0.9**TIME, 1e-9)
    else:
        assert bool((reading.retention < plain.retention * 1e-2).all())
    limit = float(plain.norm.min()) / 2
    normed = Mitigated(model, mitigation(f"state_norm(threshold={limit})"))
    for reading in readings(normed, tokens, [TIME])[TIME]:
        assert float(reading.norm.max()) <= limit * 1.000001
        assert reading.retention is None
        assert reading.first_share is None


def test_models_of_another_kind() -> None:
    """A model that is not a RecurrentLM raises a UserError."""
    model: Any = nn.Linear(2, 2)
    with pytest.raises(UserError, match="Linear"):
        readings(model, random_tokens(1, 3), [3])


def prompt(name: str, time: int, seed: int = 0) -> Prompt:
    return Prompt(name, f"{seed:08x}" * 8, random_tokens(1, time, seed)[0])


def holding(layer: int, head: int) -> RecurrentLM:
    """Return a Mamba-2 with one head that never forgets; all others forget within a few tokens."""
    model = build_model("mamba2", dtype=torch.float32)
    with torch.no_grad():
        for index, mixer in enumerate(model.cells):
            assert isinstance(mixer, Mamba2)
            mixer.A_log.fill_(3.0)
            mixer.dt_bias.fill_(0.0)
            if index == layer:
                mixer.A_log[head] = -12.0
    return model.eval()


@pytest.fixture
def found(tmp_path: Path) -> Diagnosis:
    ones = torch.ones(1000, dtype=torch.long)
    return diagnose(
        holding(1, 2),
        [prompt("a.txt", 1000), newlines(ByteTokenizer(), 1000)._replace(tokens=ones)],
        train_length=64,
        output=tmp_path,
        checkpoint="made",
        first=32,
        quiet=True,
    )


def test_a_head_that_holds_on_collapses(found: Diagnosis, tmp_path: Path) -> None:
    """The diagnosis names the collapsing head and no other, and its file is plain YAML."""
    assert found.collapsing() == [[1, 2]]
    assert found.global_heads() == [[1, 2]]
    (finding,) = [f for f in found.findings if f.left and f.prompt == "newlines"]
    assert finding[:2] == (1, 2)
    assert "norm" in finding.left
    assert finding.onset in (128, 256)
    assert finding.growth > 10
    assert finding.retention is not None
    assert finding.retention > 0.99
    content = yaml.safe_load((tmp_path / "diagnosis.yaml").read_text())
    assert content["format"] == "longrnn-diagnosis-1"
    assert content["fingerprint"] == holding(1, 2).fingerprint()
    assert (content["train_length"], content["length"]) == (64, 1000)
    assert content["collapsing"] == content["global"] == [[1, 2]]
    assert [p["name"] for p in content["prompts"]] == ["a.txt", "newlines"]
    assert content["prompts"][0]["sha256"] == "0" * 64
    assert {(e["layer"], e["head"]) for e in content["evidence"]} == {(1, 2)}
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "channels.jsonl", "diagnosis.yaml", "states.jsonl",
    ]  # fmt: skip


def test_a_mitigation_reads_the_diagnosis(found: Diagnosis, tmp_path: Path) -> None:
    """A mitigation reads the collapsing heads from the diagnosis."""
    spec = f"state_norm(threshold=1, heads=collapsing, diagnosis={tmp_path / 'diagnosis.yaml'})"
    (masks,) = Mitigated(holding(1, 2), mitigation(spec)).heads
    assert [mask.nonzero().tolist() for mask in masks] == [[], [[2]]]
    with pytest.raises(UserError, match="model"):
        Mitigated(holding(1, 1), mitigation(spec))


def test_rows(found: Diagnosis, tmp_path: Path) -> None:
    """There is one row per layer, head, prompt and position."""
    rows = [json.loads(line) for line in (tmp_path / "states.jsonl").read_text().splitlines()]
    positions = [*range(4, 65, 4), *range(128, 1000, 128), 1000]
    keys = [(r["position"], r["layer"], r["prompt"], r["head"]) for r in rows]
    heads = 4
    assert len(set(keys)) == len(keys) == len(positions) * 2 * 2 * heads
    assert sorted({r["position"] for r in rows}) == positions
    tokens = torch.stack([p.tokens for p in found.prompts])
    with torch.no_grad():
        state = holding(1, 2)(tokens[:, :128], keep=0).state
    row = next(r for r in rows if (r["position"], r["layer"], r["prompt"], r["head"])
               == (128, 1, "newlines", 2))  # fmt: skip
    assert row["norm"] == pytest.approx(float(state.layers[1].ssm[1, 2].norm()), rel=1e-4)
    assert set(row) == {
        "layer", "head", "prompt", "position", "mean", "variance", "norm", "retention",
        "first_share", "output_norm", "largest", "channels_90", "top_channel", "output_share",
        "output_channels_90", "loss",
    }  # fmt: skip


@pytest.mark.parametrize("mixer", list(MIXERS))
def test_every_cell(mixer: str, tmp_path: Path) -> None:
    """Cells without heads or without decay are diagnosed."""
    model = build_model(mixer, position="sinusoidal", dtype=torch.float32)
    found = diagnose(model, [prompt("a", 300)], train_length=50, output=tmp_path, quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "states.jsonl").read_text().splitlines()]
    assert {row["head"] for row in rows} == set(range(4 if mixer == "mamba2" else 1))
    assert all(math.isfinite(row["norm"]) for row in rows)
    assert {row["retention"] is None for row in rows} == {mixer == "rnn"}
    assert found.retention_is_defined() == (mixer != "rnn")


def test_states_that_overflow(tmp_path: Path) -> None:
    """States that are not finite are null in JSON and count as collapsed."""
    model = build_model({"kind": "rnn", "nonlinearity": "relu"}, dtype=torch.float32)
    mixer = model.cells[0]
    assert isinstance(mixer, RNN)
    _, recurrent, _, bias = mixer.cell.all_weights[0]
    with torch.no_grad():
        recurrent.fill_(10.0)
        bias.fill_(1.0)
    found = diagnose(model, [prompt("a", 300)], train_length=16, output=tmp_path, quiet=True)
    assert [0, 0] in found.collapsing()
    rows = [
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
        for line in (tmp_path / "states.jsonl").read_text().splitlines()
    ]
    assert rows[-1]["norm"] is None
    assert "nan" not in (tmp_path / "diagnosis.yaml").read_text().lower().split()


def test_an_interrupted_diagnosis_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted diagnosis leaves no partial record."""

    def interrupted(*arguments: Any, **options: Any) -> Any:
        yield from ()
        raise KeyboardInterrupt

    monkeypatch.setattr(states, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        diagnose(build_model("gru"), [prompt("a", 300)], train_length=50, output=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"train_length": 300}, "300"),
        ({"train_length": 0}, ""),
        ({"every": 0}, ""),
        ({"first": 0}, ""),
        ({"first": 300}, "length"),
    ],
)
def test_settings(options: dict[str, int], says: str, tmp_path: Path) -> None:
    """Invalid settings raise a UserError before the model runs."""
    settings: dict[str, Any] = {"train_length": 50, "first": 20, **options}
    with pytest.raises(UserError, match=says):
        diagnose(build_model("gru"), [prompt("a", 300)], output=tmp_path / "out", **settings)
    assert not list(tmp_path.iterdir())


def test_prompts(tmp_path: Path) -> None:
    """Prompts have the requested length, and prompts of equal name are told apart."""
    text = Document("a.txt", "f" * 64, torch.arange(10))
    assert text_prompt(text, 10).tokens.tolist() == list(range(10))
    assert text_prompt(text, 4).tokens.tolist() == [0, 1, 2, 3]
    with pytest.raises(UserError, match=naming("a.txt", 10, 11)):
        text_prompt(text, 11)
    assert newlines(ByteTokenizer(), 5).tokens.tolist() == [10] * 5

    class Pairs(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [1, 2] if text == "\n" else []

    assert newlines(Pairs(), 5).tokens.tolist() == [1, 2, 1, 2, 1]
    Pairs.encode = lambda self, text: []
    with pytest.raises(UserError):
        newlines(Pairs(), 5)
    pair = [prompt("a", 200, 1), prompt("a", 200, 2)]
    found = diagnose(build_model("rnn"), pair, train_length=50, output=tmp_path, quiet=True)
    assert [p.name for p in found.prompts] == ["a (00000001)", "a (00000002)"]
