"""A hybrid computes with our cells what transformers computes with its own layers."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import load
from longrnn.errors import UserError
from longrnn.hf.auto import LongRNNForCausalLM
from longrnn.hf.foreign import ForeignLM
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.hf.hybrid.lightning import LightningAttention
from longrnn.hf.hybrid.model import HybridLM
from tests.contracts.builders import assert_near
from tests.hf.foreign import (
    REFUSED,
    TABLES,
    architecture,
    assert_continues,
    hybrid,
    in_one_call,
    tokens,
)

TOLERANCE = 1e-5
DTYPES = (torch.bfloat16, torch.float16)
# Options that an architecture's layers have beside the tiny defaults.
VARIANTS = [(kind, {}) for kind in sorted(FAMILIES)]
VARIANTS += [(kind, options) for kind, some in TABLES["variants"].items() for options in some]


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_pieces_and_forks_equal_one_call_of_transformers(
    kind: str, options: dict[str, Any]
) -> None:
    theirs, text = architecture(kind, **options), tokens(2, 40, seed=3) % 60
    expected = in_one_call(theirs, text)
    assert_continues(hybrid(theirs), text, expected, TOLERANCE)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_the_model_stays_as_it_was_for_transformers(kind: str) -> None:
    """Names and values of weights, and what transformers computes with its own cache, stay."""
    plain, theirs, text = architecture(kind), architecture(kind), tokens(2, 12) % 60
    model = open_hugging_face(theirs)
    assert list(theirs.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        expected, found = (each(input_ids=text, use_cache=True) for each in (plain, theirs))
    assert torch.equal(expected.logits, found.logits)
    assert [*expected] == [*found]
    if kind not in REFUSED:
        assert model.fingerprint() == ForeignLM(plain).fingerprint()


def stirred_weights(model: HybridLM) -> dict[str, Tensor]:
    """Other weights, by their names in `model.model`."""
    draw = torch.Generator().manual_seed(1)
    return {
        name: weight + 0.3 * torch.randn(weight.shape, generator=draw)
        for name, weight in model.model.named_parameters()
    }


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_weights_that_take_the_place_of_others_are_used(kind: str) -> None:
    model, text = pickle.loads(pickle.dumps(hybrid(architecture(kind)))), tokens(1, 12) % 60
    weights = stirred_weights(model)
    called = {f"model.{name}": weight for name, weight in weights.items()}
    before = model(text).logits
    found = torch.func.functional_call(model, called, (text,)).logits
    assert torch.equal(model(text).logits, before)
    model.model.load_state_dict(weights, assign=True, strict=False)
    model.model.tie_weights()
    expected = in_one_call(model.model, text)
    assert_near(found, expected, TOLERANCE)
    assert_near(model(text).logits, expected, TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("bamba", {"hidden_act": "relu"}, "relu"),
        ("qwen3_next", {"hidden_act": "gelu"}, "gelu"),
        ("bamba", {}, "logits differ"),
    ],
)
def test_transformers_computes_layers_that_our_cells_do_not(
    kind: str,
    options: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning names the reason, and the model is a language model without mitigations."""
    if not options:
        wrong = FAMILIES[kind]._replace(project=lambda theirs, x: theirs.in_proj(1.01 * x))
        monkeypatch.setitem(FAMILIES, kind, wrong)
    theirs, text = architecture(kind, **options), tokens(2, 40, seed=3) % 60
    model = open_hugging_face(theirs)
    assert reason in caplog.text
    assert type(model) is ForeignLM
    assert_continues(model, text, in_one_call(theirs, text), TOLERANCE)
    with pytest.raises(UserError, match="no recurrence"):
        model.under("forget_more")


@pytest.mark.parametrize(("factor", "opens"), [(1.0, True), (1.5, False)])
def test_rounding_is_told_from_another_result(
    factor: float, opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that bfloat16 changes by half is a hybrid where our cells are nearer to float32."""
    theirs = architecture("minimax", block_size=4)
    for weight in theirs.parameters():
        weight.data *= 3
    theirs = theirs.to(torch.bfloat16)
    before = {name: weight.clone() for name, weight in theirs.state_dict().items()}
    whole, run = LightningAttention.before, lambda cell, x, *rest: whole(cell, factor * x, *rest)
    monkeypatch.setattr(LightningAttention, "before", run)
    if opens:
        hybrid(theirs)
    else:
        with pytest.raises(UserError, match=r"from float32 by .* MiniMaxCache"):
            open_hugging_face(theirs)
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, before[name])
        assert weight.dtype == before[name].dtype


@pytest.mark.parametrize("kind", ["granitemoehybrid", "qwen3_next", "qwen3_5_moe_text"])
def test_the_check_does_not_depend_on_which_of_two_equal_experts_is_chosen(kind: str) -> None:
    """In bfloat16, rounding decides it differently in pieces than in one call."""
    theirs = architecture(kind)
    with torch.no_grad():
        for name, scores in theirs.named_parameters():
            if name.endswith(("mlp.gate.weight", "router.weight", "router.layer.weight")):
                scores.copy_(scores[:1] + 0.01 * (scores - scores[:1]))
    assert isinstance(open_hugging_face(theirs.to(torch.bfloat16)), HybridLM)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, DTYPES[number % 2]) for number, kind in enumerate(sorted(FAMILIES))],
)
def test_weights_of_recurrences_are_not_rounded_on_loading(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The rest has the requested dtype, states that of the weights, also after a copy's `to`."""
    theirs = architecture(kind)
    before = type(theirs)._keep_in_fp32_modules_strict
    theirs.save_pretrained(tmp_path)
    stored = hybrid(theirs)
    model = load(tmp_path, dtype=dtype)
    assert isinstance(model, HybridLM)
    for ours, original in zip(model.cells, stored.cells, strict=True):
        weights = original.state_dict()
        for name, weight in ours.state_dict().items():
            if name.endswith(ours.wide_weights):
                assert torch.equal(weight, weights[name].float()), name
        assert any(weight.dtype == dtype for weight in ours.parameters())
    text, cast = tokens(1, 12, seed=1) % 60, LongRNNForCausalLM.of(stored.under("forget_more"))
    for each in (model, cast.to(dtype).language_model, stored):
        assert each(text, each(text).state).logits.isfinite().all()
    named = load(f"{tmp_path}+{str(dtype).removeprefix('torch.')}+forget_more")
    assert named.mitigation is not None
    assert named.under(None).fingerprint() == model.fingerprint()
    assert type(theirs)._keep_in_fp32_modules_strict == before


def test_the_text_model_of_images_and_text_is_a_hybrid(tmp_path: Path) -> None:
    """Published Qwen3.5 have a configuration of both; the weights of recurrences stay wide."""
    theirs, text = architecture("qwen3_5_text"), tokens(1, 12) % 60
    theirs.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    both = {"model_type": "qwen3_5", "text_config": json.loads(config.read_text())}
    config.write_text(json.dumps(both))
    model = load(tmp_path)
    assert isinstance(model, HybridLM)
    cast: Any = LongRNNForCausalLM.from_pretrained(tmp_path)
    for each in (model, cast):
        assert_near(each(text).logits, in_one_call(theirs, text), TOLERANCE)
    narrow = load(tmp_path, dtype=torch.bfloat16)
    assert all(cell.get_parameter("A_log").dtype == torch.float32 for cell in narrow.cells)
