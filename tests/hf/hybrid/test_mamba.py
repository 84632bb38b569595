"""Hugging Face models with Mamba layers under mitigations."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn import load, mitigation
from longrnn.mitigations import MITIGATIONS
from tests.contracts.builders import mitigation_spec
from tests.hf.foreign import architecture, assert_continues, tokens
from tests.mitigations.definitions import Definition

KINDS = {"falcon_mamba": {}, "jamba": {}, "mamba": {}, "zamba": {"n_mamba_heads": 1}}


class EditedScan:
    """Takes the place of the selective scan of transformers: one token at a time, mitigated.

    The layers call it in turn.
    """

    def __init__(self, spec: dict[str, Any], n_layers: int, n_heads: int) -> None:
        self.chains = [Definition([spec], layer, n_heads) for layer in range(n_layers)]
        self.calls = 0

    def __call__(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **others: Any
    ) -> Tensor:
        chain = self.chains[self.calls]
        self.calls += 1
        dt = F.softplus(dt + chain.added("bias", others["delta_bias"])[:, None])
        h, outputs = x.new_zeros(len(x), len(A), 1, A.shape[1]), []
        for u, step, b, c in zip(*(one.unbind(-1) for one in (x, dt, B, C)), strict=True):
            xB = u[..., None, None] * b[:, None, None]
            h = chain.scanned(step[..., None, None], A[:, None], xB, h)
            outputs.append((h[:, :, 0] * c[:, None]).sum(-1))
        return (torch.stack(outputs, -1) + others["D"][:, None] * x) * F.silu(others["z"])


@pytest.mark.parametrize("name", sorted(MITIGATIONS.keys()))
@pytest.mark.parametrize("kind", KINDS)
def test_a_mitigation_is_that_of_an_edited_layer_of_transformers(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces, forks and rows of different lengths too."""
    theirs, text = architecture(kind, **KINDS[kind]), tokens(2, 40, seed=3) % 60
    theirs.save_pretrained(tmp_path)
    spec = mitigation_spec(name)
    model: Any = load(tmp_path).under(mitigation(spec))
    edited = EditedScan(spec, len(model.cells), model.cells[0].n_heads)
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    monkeypatch.setattr(module, "mamba_selective_scan", edited)
    with torch.no_grad():
        expected = theirs(input_ids=text, use_cache=False).logits
    monkeypatch.undo()
    assert edited.calls == len(model.cells)
    assert_continues(model, text, expected, 1e-5)
