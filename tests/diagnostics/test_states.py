"""State statistics equal those of a loop over tokens, and constructed heads collapse."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from longrnn.cells import GRU, LSTM, MIXERS, RNN, Mamba2
from longrnn.diagnostics.states import Diagnosis, Finding, Observations, diagnose, find, observe
from longrnn.errors import UserError
from longrnn.evaluation.texts import Document
from longrnn.mitigations import mitigation
from longrnn.models import RecurrentLM
from longrnn.reporting.states import write_report
from tests.contracts.builders import assert_near, build_model, random_tokens
from tests.pages import read_alone, read_tables

TIME = 90


class Loop:
    """Processes one token after another, keeps everything and edits nothing."""

    def __init__(self, model: RecurrentLM, tokens: Tensor) -> None:
        self.kind, self.cells = model.config.mixer["kind"], model.cells
        self.inputs: list[list[Tensor]] = [[] for _ in model.cells]  # (b, d) per token
        handles = [
            cell.register_forward_hook(self.keep(layer)) for layer, cell in enumerate(self.cells)
        ]
        state = model.init_state(len(tokens))
        self.states, losses = [state], []
        with torch.no_grad():
            for token, target in zip(tokens.T[:-1], tokens.T[1:], strict=True):
                logits, state = model(token[:, None], state)
                losses.append(nn.functional.cross_entropy(logits[:, 0], target, reduction="none"))
                self.states.append(state)
        self.losses = torch.stack(losses, 1)
        for handle in handles:
            handle.remove()

    def keep(self, layer: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: Any) -> None:
            self.inputs[layer].append(arguments[0][:, 0])

        return hook

    def memory(self, layer: int, time: int) -> Tensor:
        """Returns the states, `(b, heads, channels, n)`."""
        state = self.states[time].layers[layer]
        if hasattr(state, "ssm"):
            return state.ssm
        return (state.c if self.kind == "lstm" else state.h)[:, None, :, None]

    def decay(self, layer: int, start: int, stop: int) -> Tensor:
        """Returns the retention from `start` to `stop` tokens, `(b, heads, 1 or entries)`."""
        product = torch.ones(())
        for time in range(start, stop):
            product = product * self.gate(layer, time)
        return product

    def gate(self, layer: int, time: int) -> Tensor:
        """Returns the decay of the token at `time`, from the equations of the cell."""
        x, cell = self.inputs[layer][time], self.cells[layer]
        if isinstance(cell, Mamba2):
            raw = x @ cell.in_proj.weight.T[:, -cell.n_heads :] + cell.dt_bias
            return (-cell.A_log.exp() * torch.log(1 + raw.exp())).exp()[..., None]
        assert isinstance(cell, (GRU, LSTM))
        w_ih, w_hh, b_ih, b_hh = cell.cell.all_weights[0]
        gates = x @ w_ih.T + b_ih + self.states[time].layers[layer].h @ w_hh.T + b_hh
        d = cell.d_model
        return torch.sigmoid(gates[:, d : 2 * d])[:, None]  # f of an LSTM, z of a GRU


def at(seen: Observations, place: int) -> Observations:
    """Returns the observations at one position, without its axis."""
    return Observations(*(values[place] for values in seen))


def last(model: RecurrentLM, tokens: Tensor) -> Observations:
    return at(observe(model, tokens, [TIME]), 0)


@pytest.mark.parametrize("mixer", list(MIXERS))
def test_observations_equal_a_loop(mixer: str) -> None:
    model, tokens = build_model(mixer), random_tokens(3, TIME + 1)
    loop = Loop(model, tokens)
    begin = 0
    seen = observe(model, tokens, [7, 33, TIME])
    for place, stop in enumerate(seen.position.tolist()):
        found = at(seen, place)
        assert_near(found.loss, loop.losses[:, begin:stop].mean(1), 1e-6, "loss")
        for layer in range(len(model.cells)):
            memory = loop.memory(layer, stop)
            flat = memory.flatten(2)
            norm = flat.square().sum(-1).sqrt()
            assert_near(found.mean[layer], flat.mean(-1), 1e-10, "mean")
            assert_near(found.norm[layer], norm, 1e-10, "norm")
            assert_near(found.deviation[layer], flat.std(-1, correction=0), 1e-10, "deviation")
            assert_near(found.channels[layer], memory.square().mean(-1).sqrt(), 1e-10, "channels")
            sizes = memory.square().sum(-1).flatten(1).sort(descending=True).values
            share = sizes[:, : -(-sizes.shape[1] // 100)].sum(1) / sizes.sum(1)
            assert_near(seen.outliers[place, layer], share, 1e-10, "outliers")
            if mixer == "rnn":
                assert bool(found.retention.isnan().all())
                assert bool(found.gate.isnan().all())
            if mixer in ("gru", "lstm", "mamba2"):
                kept = loop.decay(layer, 0, stop).mean(-1)
                assert_near(found.retention[layer], kept.expand_as(norm), 1e-9, "retention")
                gate = loop.decay(layer, begin, stop) ** (1 / (stop - begin))
                assert_near(found.gate[layer], gate.mean(-1).expand_as(norm), 1e-9, "gate")
        begin = stop
    assert not any(cell.is_observed for cell in model.cells)


@pytest.mark.parametrize("mixer", ["mamba2", "gru", "lstm"])
def test_observations_under_a_mitigation(mixer: str) -> None:
    model, tokens = build_model(mixer), random_tokens(2, TIME)
    plain = last(model, tokens)
    forget = mitigation("forget_more(decay_scale=0.9, input_scale=1)")
    forgetful = last(model.under(forget), tokens)
    if mixer == "mamba2":  # its gates do not depend on its state
        assert_near(forgetful.retention[0], plain.retention[0] * 0.9**TIME, 1e-9)
    else:
        assert bool((forgetful.retention < plain.retention * 1e-2).all())
    limit = float(plain.norm.min()) / 2
    limited = last(model.under(mitigation(f"state_norm(threshold={limit})")), tokens)
    assert float(limited.norm.max()) <= limit * 1.000001
    windowed = last(model.under(mitigation("sliding_window(window=8)")), tokens)
    assert bool(windowed.norm.isfinite().all())
    for one in (limited, windowed):
        assert bool(one.retention.isnan().all())


ENTRIES, TRAINED, LENGTH, EVERY = 64, 1024, 32768, 64


def judged(norm: Callable[[int], float], mean: Callable[[int], float] = lambda t: 0.0) -> Finding:
    """Returns the finding on one head whose state has this norm and mean at position t."""
    nothing = torch.zeros(1)
    seen = []
    for t in range(EVERY, LENGTH + 1, EVERY):
        deviation = math.sqrt(max(norm(t) ** 2 / ENTRIES - mean(t) ** 2, 0))
        numbers = (
            torch.full((1, 1, 1), value).double() for value in (mean(t), deviation, norm(t), 0, 0)
        )
        seen.append([torch.tensor(t), nothing, *numbers, nothing])
    stacked = Observations(*map(torch.stack, zip(*seen, strict=True)))
    (finding,) = find(stacked, TRAINED)
    return finding


@pytest.mark.parametrize("memory", [1, 300])
def test_a_stationary_head_does_not_collapse(memory: int) -> None:
    for seed in range(20):
        randomness = np.random.default_rng(seed)
        keep = math.exp(-EVERY / memory)
        state, norms, means = np.zeros(ENTRIES), {}, {}
        for position in range(EVERY, LENGTH + 1, EVERY):
            added = randomness.standard_normal(ENTRIES) * randomness.gamma(1.0)
            state = keep * state + math.sqrt(1 - keep**2) * added
            norms[position], means[position] = float(np.linalg.norm(state)), float(state.mean())
        assert judged(norms.__getitem__, means.__getitem__).left == ()


@pytest.mark.parametrize(
    ("norm", "mean", "left", "onset"),
    [
        (lambda t: 9.0 if 8192 < t <= 16384 else 1.0, 0.0, (), None),
        (lambda t: 9.0 if t > 16896 else 1.0, 0.0, (), None),
        (lambda t: 9.0 if t > 12000 else 1.0, 0.0, ("deviation", "norm"), 12032),
        (lambda t: 8.0, 0.45, (), None),
        (lambda t: 8.0, -0.9, ("mean",), 1088),
        (lambda t: 1.0 if t <= TRAINED else 1e-6, 0.0, (), None),
        (lambda t: 0.0, 0.0, (), None),
        (lambda t: math.nan if t > 500 else 1.0, 0.0, ("mean", "deviation", "norm"), 1088),
        (lambda t: math.nan if t > 2000 else 1.0, 0.0, ("deviation", "norm"), 2048),
    ],
)
def test_the_criterion(
    norm: Callable[[int], float], mean: float, left: tuple[str, ...], onset: int | None
) -> None:
    """Leaving the range for most of the prompt is collapse; NaN is outside; shrinking is not."""
    found = judged(
        norm, lambda t: mean if t > TRAINED else math.copysign(min(abs(mean), 0.1), -mean)
    )
    assert (found.left, found.onset) == (left, onset)
    end, largest = norm(LENGTH), max(map(norm, range(EVERY, TRAINED + 1, EVERY)))
    assert found.growth == pytest.approx(math.inf if math.isnan(end) else end and end / largest)


def test_the_fastest_growing_heads_come_first() -> None:
    heads = [(0, 0, 2.0), (0, 1, math.inf), (1, 0, 3.0), (0, 0, 5.0)]
    findings = [Finding(i, k, 0, ("norm",), 65, growth, 1.0) for i, k, growth in heads]
    nothing = Observations(*[torch.zeros(0)] * 8)
    assert Diagnosis({}, nothing, findings).collapsing() == [(0, 1), (0, 0), (1, 0)]


def text(name: str, time: int, seed: int = 0) -> Document:
    return Document(name, f"{seed:08x}" * 8, random_tokens(1, time, seed)[0])


def holding(layer: int, head: int) -> RecurrentLM:
    """Returns a Mamba-2 with one head that never forgets; all others forget in a few tokens."""
    model = build_model("mamba2", dtype=torch.float32)
    with torch.no_grad():
        for index, cell in enumerate(model.cells):
            assert isinstance(cell, Mamba2)
            cell.A_log.fill_(3.0)
            cell.dt_bias.fill_(0.0)
            if index == layer:
                cell.A_log[head] = -12.0
    return model.eval()


@pytest.fixture
def found(tmp_path: Path) -> Diagnosis:
    ones = Document("ones", "1" * 64, torch.ones(1200, dtype=torch.long))
    texts = [text("a", 1000, 1), text("b", 1000, 2), ones]
    options: dict[str, Any] = {"checkpoint": "<b>made</b> & co", "quiet": True}
    found = diagnose(holding(1, 2), texts, 1000, train_length=64, **options)
    write_report(found, tmp_path)
    return found


def test_a_head_that_keeps_everything_collapses(found: Diagnosis, tmp_path: Path) -> None:
    assert found.collapsing() == found.global_heads() == [(1, 2)]
    finding = next(one for one in found.findings if one.left and one.text == 2)
    assert finding[:2] == (1, 2)
    assert finding.onset in (128, 256)
    assert finding.growth > 10
    inside = found.seen.position == 64
    assert finding.retention == float(found.seen.retention[inside][0, 1, 2, 2]) > 0.99
    file = tmp_path / "diagnosis.yaml"
    content = yaml.safe_load(file.read_text())
    assert content["collapsing"] == content["global"] == [[1, 2]]
    assert [one["name"] for one in content["texts"]] == ["a", "b", "ones"]
    rows = [json.loads(line) for line in (tmp_path / "states.jsonl").read_text().splitlines()]
    positions = [*range(4, 65, 4), *range(128, 1000, 128), 1000]
    assert [row["position"] for row in rows] == positions
    assert np.array([row["norm"] for row in rows]).shape == (len(positions), 2, 3, 4)
    spec = f"state_norm(threshold=1, heads=collapsing, diagnosis={file})"
    (masks,) = holding(1, 2).under(mitigation(spec)).mitigated_heads
    assert [mask.nonzero().tolist() for mask in masks] == [[], [[2]]]
    with pytest.raises(UserError, match="the diagnosis of another model"):
        holding(1, 1).under(mitigation(spec))
    limited = holding(1, 2).under(mitigation("state_norm(threshold=1)"))
    write_report(diagnose(limited, [text("a", 300)], 300, train_length=64, quiet=True), tmp_path)
    with pytest.raises(UserError, match="the diagnosis of another model"):
        holding(1, 2).under(mitigation(spec))


@pytest.mark.pictures
def test_the_report(found: Diagnosis, tmp_path: Path) -> None:
    page = read_alone(tmp_path / "report.html", pictures=4)
    assert "<title>States of &lt;b&gt;made&lt;/b&gt; &amp; co</title>" in page
    assert "1 of 8 heads collapse beyond the training length: layer 1 head 2." in page
    _, (_, first, *others) = read_tables(page)
    assert (first[:2], len(others)) == (["1", "2"], 23)


@pytest.mark.pictures
def test_states_that_overflow(tmp_path: Path) -> None:
    """States that are not finite are null in JSON, count as collapsed, and can be drawn."""
    model = build_model({"kind": "rnn", "nonlinearity": "relu"}, dtype=torch.float32)
    cell = model.cells[0]
    assert isinstance(cell, RNN)
    _, recurrent, _, bias = cell.cell.all_weights[0]
    with torch.no_grad():
        recurrent.fill_(10.0)
        bias.fill_(1.0)
    found = diagnose(model, [text("a", 300)], 300, train_length=16, quiet=True)
    assert (0, 0) in found.collapsing()
    write_report(found, tmp_path)
    lines = (tmp_path / "states.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    assert rows[-1]["norm"][0][0][0] is None
