"""Mitigations, calibration and diagnosis on the recurrent layers of a hybrid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from longrnn import state as states
from longrnn.cells import Cell
from longrnn.cli.app import app
from longrnn.diagnostics.observe import observe
from longrnn.errors import UserError
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.hf.hybrid.model import HybridLM, open_hugging_face
from longrnn.mitigations import MITIGATIONS, mitigation
from longrnn.ops import delta, scan
from longrnn.ops.scan import ScanInputs
from longrnn.state import join, leaves
from tests.contracts.builders import assert_near, mitigation_spec
from tests.hf.architectures import architecture
from tests.hf.foreign import tokens, with_bytes

LIMIT = 0.01


def hybrid(kind: str) -> HybridLM:
    theirs = architecture(kind).double()
    # The fast implementation of experts has no float64.
    theirs.config._experts_implementation = "eager"
    model = open_hugging_face(theirs)
    assert isinstance(model, HybridLM)
    return model


class TokenByToken(nn.Module):
    """The definition of `state_norm` in place of `Cell.recurrence`, one token at a time."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.loop = scan.loop if cell.diagonal else delta.loop

    def forward(
        self, inputs: ScanInputs, state: Tensor, recent: None, *others: object
    ) -> tuple[Tensor, Tensor, None]:
        outputs = []
        for t in range(inputs.x.shape[1]):
            _, state = self.loop(inputs.slice(t, t + 1), state)
            norm = state.flatten(2).norm(dim=-1)[..., None, None]
            state = state * (LIMIT / norm).clamp(max=1)
            C = inputs.C[:, t].repeat_interleave(state.shape[1] // inputs.C.shape[2], 1)
            outputs.append((state * C[:, :, None].to(state)).sum(-1))
        return torch.stack(outputs, 1), state, recent


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_state_norm_equals_its_definition_token_by_token(kind: str) -> None:
    """In float64, and different from the plain model."""
    model, text = hybrid(kind), tokens(2, 24, seed=2) % 60
    plain = model(text).logits
    mitigated = model.under(mitigation(f"state_norm(threshold={LIMIT})"))
    logits, state = mitigated(text)
    for cell in model.cells:
        cell.recurrence = TokenByToken(cell)
    expected, after = mitigated(text)
    assert_near(logits, expected, 1e-10)
    for found, wanted in zip(mitigated.memories(state), model.memories(after), strict=True):
        assert_near(found, wanted, 1e-10)
    assert not torch.allclose(logits, plain)


@pytest.mark.parametrize("name", sorted(MITIGATIONS.keys()))
@pytest.mark.parametrize("kind", ["falcon_h1", "olmo_hybrid", "qwen3_5_text", "qwen3_next"])
def test_mitigated_pieces_and_forks_equal_one_call(kind: str, name: str) -> None:
    """Every mitigation is exact at every split, for rows of different lengths and from forks."""
    model, chosen = hybrid(kind), mitigation(mitigation_spec(name))
    if name == "sliding_window" and not model.cells[0].diagonal:
        with pytest.raises(UserError, match="matrices"):
            model.under(chosen)
        return
    mitigated = model.under(chosen)
    text = tokens(2, 30, seed=4) % 60
    expected, state, rows = mitigated(text).logits, None, []
    for piece in text.split([3, 1, 11, 15], dim=1):
        logits, state = mitigated(piece, state)
        rows.append(logits)
    assert_near(torch.cat(rows, 1), expected, 1e-9)
    both = join([mitigated(text[:1, :9]).state, mitigated(text[1:, :20]).state])
    before = {name: leaf.clone() for name, leaf in leaves(both)}
    follow = torch.stack([text[0, 9:19], text[1, 20:]])
    for _ in range(2):
        logits, _ = mitigated(follow, both)
        assert_near(logits[0], expected[0, 9:19], 1e-9)
        assert_near(logits[1], expected[1, 20:], 1e-9)
    assert all(torch.equal(leaf, before[name]) for name, leaf in leaves(both))


def test_layers_count_the_mamba_2_layers() -> None:
    """Layer 1 of a Bamba with attention in the middle is its third layer."""
    model, text = hybrid("bamba"), tokens(1, 20)
    assert model.layer_numbers == [0, 2]
    state = model(text).state
    limited = model.under(mitigation(f"state_norm(threshold={LIMIT}, layers=[1])"))
    changed = limited(text).state
    first, second = (
        torch.allclose(state.layers[number].cell.ssm, changed.layers[number].cell.ssm, atol=1e-6)
        for number in model.layer_numbers
    )
    assert (first, second) == (True, False)
    keys = [one.layers[1].attention.keys[0] for one in (state, changed)]
    torch.testing.assert_close(*keys)
    with pytest.raises(UserError, match="layer 2"):
        model.under(mitigation(f"state_norm(threshold={LIMIT}, layers=[2])"))


def test_a_state_of_another_mitigation_is_refused(tmp_path: Path) -> None:
    """In a call by its structure, and from a file by the fingerprint."""
    model, text = hybrid("bamba"), tokens(1, 5)
    one, other = (model.under(mitigation(f"sliding_window(window={n})")) for n in (3, 4))
    with pytest.raises(UserError):
        model(text, one(text).state)
    with pytest.raises(UserError):
        one(text, model(text).state)
    states.save(one(text).state, tmp_path / "state", model=one)
    states.load(tmp_path / "state", one)
    for wrong in (other, model):
        with pytest.raises(UserError):
            states.load(tmp_path / "state", wrong)


def test_states_are_measured_as_they_are() -> None:
    """The norms of a diagnosis are those of the states, and the loss is that of the logits."""
    model, text = hybrid("granitemoehybrid"), tokens(2, 33, seed=6) % 60
    (measured,) = observe(model, text, [32])
    after = model.cell_states(model(text[:, :32]).state)
    for norm, state in zip(measured.norm, after, strict=True):
        assert_near(norm, state.ssm.flatten(2).norm(dim=-1), 1e-9)
    assert bool(measured.retention.isfinite().all())
    logits = model(text[:, :32]).logits.transpose(1, 2)
    losses = torch.nn.functional.cross_entropy(logits, text[:, 1:], reduction="none")
    assert_near(measured.loss, losses.mean(1), 1e-9)


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("kind", "mixer"), [("falcon_h1", "mamba2"), ("qwen3_next", "gated_deltanet")]
)
def test_commands(kind: str, mixer: str, tmp_path: Path) -> None:
    """Info, calibration, diagnosis, perplexity and passkey run on a hybrid."""
    theirs = architecture(kind, vocab_size=256, max_position_embeddings=2048)
    folder, text = with_bytes(theirs, tmp_path / "hybrid"), tmp_path / "book.txt"
    text.write_text("The grass is green. The sky is blue. The sun is yellow. Here we go. " * 12)
    assert f" × {mixer}" in run("info", folder)
    calibrated, common = tmp_path / "norm.yaml", ["--text", text, "--quiet"]
    run("calibrate", folder, *common, "--train-length", 64, "--method", "state_norm",
        "--output", calibrated)  # fmt: skip
    out = tmp_path / "states"
    run("diagnose", "states", folder, *common, "--train-length", 64, "--length", 256,
        "--output", out)  # fmt: skip
    assert "collapsing" in (out / "diagnosis.yaml").read_text()
    run("eval", "perplexity", folder, *common, "--lengths", 128, "--mitigation", calibrated,
        "--output", tmp_path / "ppl")  # fmt: skip
    run("eval", "passkey", f"{folder}+forget_more", "--lengths", 256, "--n", 1,
        "--depths", 1, "--quiet", "--output", tmp_path / "passkey")  # fmt: skip
