"""Additions to the weights that make steps, `time_scales(weights=FILE)`, under it and folded."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import load, mitigation
from longrnn.cells import MIXERS, Edit
from longrnn.checkpoints.adapters import add_adapters
from longrnn.checkpoints.convert import convert
from longrnn.checkpoints.layouts import save_model
from longrnn.errors import UserError
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.mitigations import MITIGATIONS
from longrnn.mitigations.base import Calibration
from longrnn.mitigations.spec import write_calibration
from longrnn.mitigations.time_scales import write_additions
from longrnn.models import LanguageModel, Rows
from longrnn.models.fold import fold
from tests.checkpoints.test_fold import EXPERTS, logits
from tests.contracts.builders import (
    assert_near,
    assert_trees_near,
    build_model,
    generator,
    mitigation_spec,
    random_sizes,
    random_tokens,
)
from tests.contracts.subjects import read
from tests.hf.foreign import architecture, tokens
from tests.refusals import naming
from tests.sampling import sampled

SELECTIVE = [kind for kind in MIXERS if build_model(kind).cells[0].step_weights]


def write(model: LanguageModel, path: Path, scale: float = 0.3) -> str:
    """Writes random additions for every layer of a model, and returns the mitigation."""
    randomness, layers = generator(1), dict[int, dict[str, Tensor]]()
    for layer, cell in enumerate(model.cells):
        parts = {name: attrgetter(name)(cell)[part] for name, part in cell.step_weights.items()}
        layers[layer] = {
            name: scale * torch.randn(part.shape, generator=randomness)
            for name, part in parts.items()
        }
    write_additions(path, layers, Calibration(str(path), model.fingerprint(), 8, ("text",)))
    return f"time_scales(weights='{path}')"


@torch.no_grad()
@pytest.mark.parametrize("kind", SELECTIVE)
def test_folded_additions_compute_what_the_mitigation_computes(kind: str, tmp_path: Path) -> None:
    """In any split, with carried states; the plain model differs."""
    model, text = build_model(kind), random_tokens(2, 41)
    mitigated = model.under(write(model, tmp_path / "w.safetensors"))
    expected = mitigated(text)
    assert (model(text).logits - expected.logits).abs().max() > 1e-3
    parts, _ = read(mitigated, text, None, random_sizes(41, seed=3))
    assert_near(parts, expected.logits, 1e-10)
    assert fold(mitigated).parts == ()
    folded = model(text)
    assert_near(folded.logits, expected.logits, 1e-12)
    assert_trees_near(folded.state, expected.state, 1e-12)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [name for name, family in FAMILIES.items() if family.layer != "MiniMaxLightningAttention"],
)
def test_additions_to_the_weights_of_a_hybrid_fold_under_their_own_names(
    name: str, tmp_path: Path
) -> None:
    # transformers does not compute experts in float64, and keeps some of an xLSTM in float32.
    is_wide = not any(kind in name for kind in (*EXPERTS, "moe"))
    tolerance = 1e-4 if name == "xlstm" else 1e-6 if is_wide else 1e-5
    theirs = architecture(name).double() if is_wide else architecture(name)
    model: Any = open_hugging_face(theirs)
    text = tokens(2, 40, seed=4) % 60
    plain = logits(model, text)
    mitigated = model.under(write(model, tmp_path / "w", scale=2.0 if is_wide else 0.3))
    expected = logits(mitigated, text)
    assert (plain - expected).abs().max() > 2 * tolerance * expected.abs().max()
    assert fold(mitigated).parts == ()
    assert_near(logits(model, text), expected, 1e-6)
    assert_near(logits(model.model, text), expected, tolerance)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "other"),
    sampled(
        {
            f"{kind}-{other}": (kind, other)
            for kind in SELECTIVE
            for other, member in MITIGATIONS.items()
            if member.undefined(MIXERS[kind]) is None
        },
        4,
    ),
)
def test_additions_combine_with_other_mitigations(kind: str, other: str, tmp_path: Path) -> None:
    model, text = build_model(kind), random_tokens(2, 30)
    spec = write(model, tmp_path / "w.safetensors")
    starts = torch.zeros(2, 30, dtype=torch.bool)
    starts[0, 11] = True
    rows = Rows(is_document_start=starts)
    expected = model.under([spec, mitigation_spec(other)])(text, rows=rows).logits
    fold(model.under(spec))
    assert_near(model.under(mitigation_spec(other))(text, rows=rows).logits, expected, 1e-10)


@pytest.mark.parametrize("kind", SELECTIVE)
def test_a_gradient_of_additions_is_that_of_the_weights(kind: str) -> None:
    model, text = build_model(kind, n_layers=1), random_tokens(2, 20)
    (cell,) = model.cells
    zeros = {
        name: torch.zeros_like(attrgetter(name)(cell)[part]).requires_grad_()
        for name, part in cell.step_weights.items()
    }
    model._edits = [Edit(weights=zeros)]
    model(text).logits.square().mean().backward()
    for name, part in cell.step_weights.items():
        weight = attrgetter(name)(cell)
        assert weight.grad.abs().max() > 0
        assert_near(zeros[name].grad, weight.grad[part], 1e-12, name)  # type: ignore[arg-type]


@torch.no_grad()
def test_additions_below_an_adapter_and_in_bfloat16(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.0)):
        model: Any = build_model("mamba2", dtype=dtype)
        if dtype == torch.float32:
            add_adapters(model, r=2, targets=["in_proj"], full=[])
        mitigated = model.under(write(model, tmp_path / f"{dtype}.safetensors"))
        text = random_tokens(2, 30)
        expected = mitigated(text).logits
        fold(mitigated)
        assert_near(model(text).logits, expected, tolerance)


@torch.no_grad()
def test_a_calibrated_file_folds_into_stock_transformers_and_moves_with_its_weights(
    tmp_path: Path,
) -> None:
    mixer = {"kind": "mamba2", "d_state": 6, "head_dim": 4, "n_groups": 2}
    model = build_model(mixer, vocab_size=60)
    save_model(model, tmp_path / "ours")
    folder = tmp_path / "calibrated"
    write(model, folder / "w.safetensors")
    known = Calibration("", model.fingerprint(), 8, ())
    member = {"kind": "time_scales", "weights": str(folder / "w.safetensors")}
    write_calibration(folder / "fit.yaml", [member], known)
    before = model.under(mitigation(folder / "fit.yaml")).fingerprint()
    folder.rename(tmp_path / "moved")
    assert model.under(mitigation(tmp_path / "moved/fit.yaml")).fingerprint() == before
    source, text = f"{tmp_path / 'ours'}+{tmp_path / 'moved'}/fit.yaml", tokens(2, 50) % 60
    expected = load(source)(text).logits
    convert(source, tmp_path / "hf", to="hf")
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32")
    assert_near(stock(text).logits, expected, 1e-6)


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Of another model, changed, missing, of another content, or for some heads."""
    model, path = build_model("mamba2"), tmp_path / "w.safetensors"
    spec = write(model, path)
    with pytest.raises(UserError, match=naming("w.safetensors", "another model", "again")):
        build_model("mamba2", seed=5).under(spec)
    with pytest.raises(UserError, match=naming("all heads", "layers")):
        model.under(f"time_scales(weights='{path}', heads=[0])")
    wrong = {0: {"in_proj.weight": torch.zeros(3, 8)}}
    write_additions(path, wrong, Calibration("", model.fingerprint(), 8, ()))
    with pytest.raises(UserError, match=naming("w.safetensors", "calibrated")):
        model.under(f"time_scales(weights='{path}', sha256='{64 * '0'}')")
    with pytest.raises(UserError, match=naming("in_proj.weight", "(3, 8)", "mamba2")):
        model.under(spec)
    path.write_text("nothing")
    with pytest.raises(UserError, match=naming("w.safetensors", "not a file of additions")):
        model.under(spec)
    path.unlink()
    with pytest.raises(UserError, match=naming("w.safetensors", "cannot be read")):
        model.under(spec)
