"""Statistics by channel equal those of a loop over tokens; outliers and shares are found."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from longrnn.bundled import bundled
from longrnn.cells import MIXERS, mamba2
from longrnn.diagnostics.channels import ChannelDetector, Channels, holding, top_share
from longrnn.diagnostics.record import ChannelStatistics, read
from longrnn.diagnostics.states import Diagnosis, diagnose, text_prompt
from longrnn.diagnostics.states_overview import overview
from longrnn.diagnostics.states_summary import summary
from longrnn.evaluation.texts import read_documents
from longrnn.hf.load import load_recurrent
from longrnn.hf.tokenizer import load_tokenizer
from longrnn.models import RecurrentLM
from tests.contracts.builders import assert_near, build_model, random_tokens
from tests.diagnostics.test_states import prompt

TIME, FIRST, TRAINED = 90, 20, 33
STOPS = [7, FIRST, TRAINED, 60, TIME]


class Loop:
    """Processes one token after another and keeps states, outputs by channel, and losses."""

    def __init__(self, model: RecurrentLM, tokens: Tensor, patch: pytest.MonkeyPatch) -> None:
        kind, self.layers = model.config.mixer["kind"], len(model.cells)
        heads = model.cells[0].n_heads
        normed: list[Tensor] = []
        norm = mamba2.gated_rms_norm

        def keep(*arguments: Any, **options: Any) -> Tensor:
            normed.append(norm(*arguments, **options))
            return normed[-1]

        self.states: list[list[Tensor]] = []  # (b, h, p, n) by token and layer
        self.outputs: list[list[Tensor]] = []  # (b, h, p)
        self.losses: list[Tensor] = []  # (b,)
        state = model.init_state(len(tokens))
        with torch.no_grad(), patch.context() as context:
            context.setattr(mamba2, "gated_rms_norm", keep)
            context.setattr(mamba2.Mamba2, "_fused", lambda *_: None)  # the norm is inside
            context.setattr(mamba2.parts, "gated_norm", lambda *_: None)
            for time in range(tokens.shape[1]):
                logits, state = model(tokens[:, time : time + 1], state)
                if kind == "mamba2":
                    memories = [layer.ssm for layer in state.layers]
                    outputs = normed[-self.layers :]
                else:
                    memories = [layer.c if kind == "lstm" else layer.h for layer in state.layers]
                    memories = [memory[:, None, :, None] for memory in memories]
                    outputs = [layer.h[:, None] for layer in state.layers]
                self.states.append(memories)
                self.outputs.append([y[:, 0].reshape(len(y), heads, -1) for y in outputs])
                if time + 1 < tokens.shape[1]:
                    probability = logits[:, 0].softmax(-1)[range(len(tokens)), tokens[:, time + 1]]
                    self.losses.append(-probability.log())


@pytest.mark.parametrize("mixer", list(MIXERS))
def test_channels_and_losses_equal_a_loop(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """RMS, largest entry, output energy and loss equal the loop's, and no hook remains."""
    model, tokens = build_model(mixer), random_tokens(3, TIME)
    loop = Loop(model, tokens, monkeypatch)
    before = 0
    for measured in read(model, tokens, STOPS, first=FIRST):
        stop = measured.position
        for layer, channels in enumerate(measured.channels):
            state = loop.states[stop - 1][layer]
            assert_near(channels.rms, state.square().sum(-1).div(state.shape[-1]).sqrt(), 1e-10)
            assert_near(channels.largest, state.abs().max(-1).values, 1e-10)
            outputs = torch.stack([one[layer] for one in loop.outputs[before:stop]])
            assert_near(channels.energy, outputs.square().sum(0) / (stop - before), 1e-10)
        losses = torch.stack(loop.losses[before:stop])
        assert_near(measured.loss, losses.mean(0), 1e-9, "loss")
        before = stop
    assert before == TIME
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("mixer", list(MIXERS))
def test_shares_inside_and_beyond_equal_a_loop(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output shares are those of sums over all tokens inside and beyond the training length."""
    model, tokens = build_model(mixer), random_tokens(2, TIME)
    loop = Loop(model, tokens, monkeypatch)
    detector = ChannelDetector(TRAINED)
    for measured in read(model, tokens, STOPS, first=FIRST):
        detector.see(measured.position, measured.channels)
    found = detector.result()
    for layer in range(loop.layers):
        energy = torch.stack([one[layer] for one in loop.outputs]).square()
        for part, shares in (
            (energy[:TRAINED].sum(0), found.shares_inside()[layer]),
            (energy[TRAINED:].sum(0), found.shares_beyond()[layer]),
        ):
            assert_near(shares, part / part.sum((1, 2), keepdim=True), 1e-10)
        for stop, values in ((TRAINED, found.rms_trained), (TIME, found.rms_end)):
            state = loop.states[stop - 1][layer]
            assert_near(values[layer], state.square().mean(-1).sqrt(), 1e-10)


def detect(values: dict[int, list[float]], trained: int = 10) -> Channels:
    """Detect outliers of one head from the RMS of its channels by position."""
    detector = ChannelDetector(trained)
    for position, by_channel in values.items():
        rms = torch.tensor(by_channel, dtype=torch.float64)[None, None]
        detector.see(position, [ChannelStatistics(rms, 2 * rms, rms.square())])
    return detector.result()


def test_only_channels_that_outgrow_their_head_are_outliers() -> None:
    """A channel that explodes alone is an outlier; one that is large or grows with all is not."""
    inside = {5: [1.0, 1.0, 1.0, 5.0, 1.0], 10: [1.0, 1.0, 1.2, 5.0, 1.0]}
    alone = detect({**inside, 20: [1.0, 9.0, 1.2, 5.0, 1.0], 30: [1.0, 30.0, 1.2, 5.0, 1.0]})
    assert alone.outlier[0, 0, 0].tolist() == [False, True, False, False, False]
    assert alone.largest_end[0, 0, 0].tolist() == [2.0, 60.0, 2.4, 10.0, 2.0]
    together = detect({**inside, 20: [9.0, 9.0, 9.0, 45.0, 9.0], 30: [9.0, 9.0, 9.0, 45.0, 9.0]})
    assert not together.outlier.any()
    once = detect({**inside, 20: [1.0, 30.0, 1.0, 5.0, 1.0], 30: [1.0, 1.0, 1.0, 5.0, 1.0]})
    assert not once.outlier.any(), "half of the measurements are not enough"


def test_how_many_channels_hold_the_energy() -> None:
    """The smallest number of channels that hold a share; unknown where the energy is not finite."""
    energy = torch.tensor([[8.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 5.0, 0.0]])
    assert holding(energy).tolist() == [2, 3, 1]
    assert holding(energy, 0.8).tolist() == [1, 3, 1]
    assert holding(energy, 1.0).tolist() == [3, 3, 1]
    assert holding(torch.tensor([[0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0]])).isnan().all()
    assert top_share(energy, 0.34).tolist() == pytest.approx([0.8, 1 / 3, 1.0])
    assert top_share(energy, 0.01).tolist() == pytest.approx([0.8, 1 / 3, 1.0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("collapse")


@pytest.fixture(scope="module")
def found(folder: Path) -> Diagnosis:
    """Return the diagnosis of an embedded model that collapses, on a novel."""
    model, tokenizer = load_recurrent("collapse-tiny"), load_tokenizer("collapse-tiny")
    novel = bundled("eval/data/moby_dick_excerpt.txt")
    (document,) = read_documents([novel], tokenizer, model)
    prompts = [text_prompt(document, 4096)]
    return diagnose(model, prompts, train_length=64, output=folder, quiet=True)


def test_heads_of_a_collapsed_model_push_the_others_out(found: Diagnosis, folder: Path) -> None:
    """The record shows the loss rising, and few heads taking over the output of a layer."""
    rows = [json.loads(line) for line in (folder / "states.jsonl").read_text().splitlines()]
    losses = {row["position"]: row["loss"] for row in rows}
    inside = [loss for position, loss in losses.items() if 32 <= position <= 64]
    assert losses[4096] > 1.5 * sum(inside) / len(inside)
    for position in (64, 4096):
        shares = [r["output_share"] for r in rows if (r["position"], r["layer"]) == (position, 1)]
        assert sum(shares) == pytest.approx(1)
    content = yaml.safe_load((folder / "diagnosis.yaml").read_text())
    change = next(one for one in content["output"] if one["layer"] == 1)
    before, after = change["head_shares_inside"], change["head_shares_beyond"]
    top = max(range(8), key=after.__getitem__)
    assert after[top] > 2 * before[top]
    assert change["channels_90_beyond"] < 0.8 * change["channels_90_inside"]
    assert f"head {top}" in summary(found) or f" {top} " in summary(found)


def test_the_file_of_channels_has_one_list_per_head(found: Diagnosis, folder: Path) -> None:
    """Lists by channel agree with the findings, and shares of a layer add up to 1."""
    rows = [json.loads(line) for line in (folder / "channels.jsonl").read_text().splitlines()]
    assert [(row["layer"], row["head"]) for row in rows] == [
        (layer, head) for layer in range(3) for head in range(8)
    ]
    for layer in range(3):
        own = [row for row in rows if row["layer"] == layer]
        for name in ("output_share_inside", "output_share_beyond"):
            assert sum(sum(row[name]) for row in own) == pytest.approx(1)
    row = rows[13]
    assert len(row["rms_end"]) == 32
    assert max(row["rms_end"]) <= max(row["largest_end"])
    norm = found.curves.values["norm"][-1, 1, 0, 5].item()
    assert math.sqrt(128 * sum(rms**2 for rms in row["rms_end"])) == pytest.approx(norm)


@pytest.mark.parametrize("mixer", list(MIXERS))
def test_every_cell_has_an_overview(mixer: str, tmp_path: Path) -> None:
    """The picture and the sentences exist for cells with one head and without a norm."""
    model = build_model(mixer, dtype=torch.float32)
    one = diagnose(model, [prompt("a", 300)], train_length=50, output=tmp_path, quiet=True)
    assert overview(one).data.startswith(b"\x89PNG")
    assert "90%" in summary(one)
    rows = [json.loads(line) for line in (tmp_path / "channels.jsonl").read_text().splitlines()]
    assert {len(row["rms_end"]) for row in rows} == {one.channels.outlier.shape[-1]}
