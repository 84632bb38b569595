"""Folding: weights that express a mitigation give its logits to readers who do not know it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import load
from longrnn.cells import MIXERS
from longrnn.checkpoints.adapters import add_adapters
from longrnn.checkpoints.convert import convert
from longrnn.checkpoints.layouts import save_model
from longrnn.errors import UserError
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.mitigations import mitigation
from longrnn.models.fold import fold
from tests.contracts.builders import assert_near, build_model, random_tokens
from tests.hf.foreign import MAMBA, MAMBA2, architecture, tokens
from tests.refusals import naming

RATES = "scale_decay(scale=3, heads=[[0, 1], [1, 0]])+power_decay(scale=1.3, layers=[1])"
BOTH = f"{RATES}+time_scales(rate=0.4, bias=-0.5, heads=[0, 2])"
KINDS = "falcon_h1 jamba kimi_linear nemotron_h olmo_hybrid qwen3_next recurrent_gemma zamba zamba2"
EXPERTS = ("jamba", "kimi_linear", "nemotron_h", "qwen3_next")


def logits(model: Any, text: Tensor) -> Tensor:
    """The logits, of a model in float64 without the float32 that transformers asks for inside."""
    with pytest.MonkeyPatch.context() as patch:
        if next(model.parameters()).dtype == torch.float64:
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(Tensor, "float", Tensor.double)
        return model(text).logits


def stock_logits(folder: Path, text: Tensor, dtype: str = "float64") -> Tensor:
    """The logits of transformers, without longrnn."""
    from transformers import AutoModelForCausalLM

    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), text)


@torch.no_grad()
@pytest.mark.parametrize("mixer", [MAMBA, {**MAMBA, "select_norm_eps": 1e-5}, MAMBA2])
def test_stock_transformers_computes_a_folded_mamba(mixer: dict[str, Any], tmp_path: Path) -> None:
    """Also where dt is limited; the plain model differs."""
    if mixer is MAMBA2:
        mixer = {**MAMBA2, "dt_limit": [0.01, 0.06]}
    save_model(build_model(mixer, vocab_size=60), tmp_path / "ours")
    text = tokens(2, 200) % 60
    expected = load(tmp_path / "ours").under(BOTH)(text).logits
    plain = load(tmp_path / "ours")(text).logits
    assert (plain - expected).abs().max() > 1e-3 * expected.abs().max()
    for layout in ["hf"] if "select_norm_eps" in mixer else ["hf", "native"]:
        convert(f"{tmp_path / 'ours'}+{BOTH}", tmp_path / layout, to=layout)
        folded = load(tmp_path / layout)
        assert folded.mitigation is None
        assert_near(folded(text).logits, expected, 1e-10)
    assert_near(stock_logits(tmp_path / "hf", text), expected, 1e-10)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS.split())
def test_stock_transformers_computes_a_folded_hybrid(kind: str, tmp_path: Path) -> None:
    # transformers does not compute experts in float64, and keeps some tables in float32.
    dtype, tolerance = ("float32", 1e-5) if kind in EXPERTS else ("float64", 3e-7)
    architecture(kind).to(getattr(torch, dtype)).save_pretrained(tmp_path / "theirs")
    source, text = f"{tmp_path / 'theirs'}+{dtype}", tokens(2, 90, seed=4) % 60
    spec = RATES if len(load(source).cells) > 1 else "scale_decay(scale=3, heads=[0])"
    spec += "+time_scales(rate=0.4, bias=-0.5)"
    expected = logits(load(f"{source}+{spec}"), text)
    convert(f"{source}+{spec}", tmp_path / "folded", to="hf")
    assert_near(stock_logits(tmp_path / "folded", text, dtype), expected, tolerance)
    plain = logits(load(source), text)
    assert (plain - expected).abs().max() > 2e-5 * expected.abs().max()


@torch.no_grad()
def test_a_bias_below_an_adapter_folds() -> None:
    pytest.importorskip("peft")
    model: Any = open_hugging_face(architecture("jamba"))
    add_adapters(model, r=2, targets=["dt_proj"], full=[])
    mitigated, text = model.under("time_scales(bias=-1)"), tokens(1, 30)
    expected = mitigated(text).logits
    fold(mitigated)
    assert_near(model(text).logits, expected, 1e-5)


@pytest.mark.parametrize("kind", [k for k, cell in MIXERS.items() if cell.bias_weight])
def test_a_folded_model_of_ours_computes_what_it_computed(kind: str) -> None:
    """Every cell, from a carried state; what does not fold stays a mitigation."""
    model = build_model(kind)
    bias = 0.3 if model.cells[0].n_heads > 1 else [[0.3], [-0.2]]
    spec = f"forget_more(decay_scale=0.9)+time_scales(bias={bias}, heads=[0])"
    if MIXERS[kind].rate_weight:
        spec = f"scale_decay(scale=2, heads=[1])+{spec}+time_scales(rate=0.3, layers=[1])"
    mitigated, text = model.under(spec), random_tokens(2, 40)
    before, state = mitigated(text[:, :13])
    expected = torch.cat([before, mitigated(text[:, 13:], state).logits], 1)
    rest = fold(mitigated)
    assert [part.name for part in rest.parts] == ["forget_more"]
    assert_near(model.under(rest)(text).logits, expected, 1e-10)


def test_a_unit_of_an_lstm_has_a_bias_of_its_own() -> None:
    """A list in the place of a head's number; a list of another length is refused."""
    model, text = build_model("lstm"), random_tokens(2, 30)
    biases = torch.linspace(-1, 1, 8).tolist()
    mitigated = model.under(f"time_scales(bias=[[{biases}], 0])")
    expected = mitigated(text).logits
    weights: Any = model.cells[0]
    with torch.no_grad():
        weights.cell.bias_ih_l0[8:16] += torch.tensor(biases, dtype=torch.float64)
    assert_near(model(text).logits, expected, 1e-10)
    with pytest.raises(UserError, match=naming("8 keys or units", "3 numbers")):
        model.under("time_scales(bias=[[[1, 2, 3]], 0])")


@pytest.mark.parametrize(
    ("mixer", "spec", "to", "words"),
    [
        (MAMBA2, "token_filter(threshold=0.1)", "hf", ("token_filter", "cannot be folded", "ours")),
        (MAMBA2, "scale_delta(scale=2)", "native", ("scale_delta", "cannot be folded")),
        ("mamba3", "time_scales(rate=1)", "ours", ("time_scales", "rate", "mamba3")),
        ("rnn", "time_scales(bias=1)", "ours", ("time_scales", "rnn")),
    ],
)
def test_what_does_not_fold_is_refused_by_name(
    mixer: Any, spec: str, to: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    """In layouts that record no mitigation, and nothing is written."""
    save_model(build_model(mixer, dtype=torch.float32), tmp_path / "ours")
    with pytest.raises(UserError, match=naming(*words)):
        convert(f"{tmp_path / 'ours'}+{spec}", tmp_path / "new", to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_our_layout_records_what_does_not_fold(tmp_path: Path) -> None:
    save_model(build_model(dtype=torch.float32), tmp_path / "ours")
    text, rest = random_tokens(2, 60), "sliding_window(window=8)"
    source = f"{tmp_path / 'ours'}+scale_decay(scale=2)+{rest}"
    convert(source, tmp_path / "new", to="ours")
    opened = load(tmp_path / "new")
    assert str(opened.mitigation) == str(mitigation(rest))
    assert_near(opened(text).logits, load(source)(text).logits, 1e-5)
    with pytest.raises(UserError, match="sliding_window.*none leaves it out"):
        convert(tmp_path / "new", tmp_path / "hf", to="hf")
    convert(f"{tmp_path / 'new'}+none", tmp_path / "hf", to="hf")
