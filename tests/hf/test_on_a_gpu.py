"""Hugging Face models, hybrids and our Auto classes on a simulated GPU give what a CPU gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn.hf.hybrid.families import FAMILIES
from longrnn.hf.hybrid.model import open_hugging_face
from longrnn.mitigations import Mitigated, mitigation
from longrnn.models import generate
from tests.contracts.builders import random_tokens
from tests.hf.architectures import architecture
from tests.hf.auto.models import build_auto
from tests.hf.foreign import tokens
from tests.simulated_cuda import simulated

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")

PIECES = [11, 1, 7]
# Every family under one mitigation, and every mitigation that reads the state in one family.
HYBRIDS = [
    *((kind, "state_norm(threshold=1.0)") for kind in FAMILIES),
    ("bamba", "sliding_window(window=7)"),
    ("bamba", "token_filter(threshold=0.05)"),
]


@pytest.fixture
def gpu() -> Any:
    return simulated(fused=False)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "spec"), HYBRIDS)
def test_hybrids(kind: str, spec: str, gpu: Any) -> None:
    """Logits in pieces from a carried state, and generated tokens."""
    text = tokens(2, sum(PIECES))
    exact = Mitigated(open_hugging_face(architecture(kind)), mitigation(spec))
    wanted, said = exact(text).logits, generate(exact, text, max_new_tokens=18).tokens
    with gpu:
        model = Mitigated(open_hugging_face(architecture(kind)).to("cuda"), mitigation(spec))
        found, state = [], model.init_state(2)
        for piece in text.to("cuda").split(PIECES, 1):
            logits, state = model(piece, state)[:2]
            found.append(logits.cpu())
        assert generate(model, text.to("cuda"), max_new_tokens=18).tokens == said
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "mamba", "recurrent_gemma"])
def test_other_architectures(kind: str, gpu: Any) -> None:
    """Their caches are states on the GPU."""
    text = tokens(2, sum(PIECES))
    exact = open_hugging_face(architecture(kind))
    with gpu:
        model = open_hugging_face(architecture(kind)).to("cuda")
        state = model(text[:, :11].to("cuda")).state
        found = model(text[:, 11:].to("cuda"), state).logits.cpu()
    torch.testing.assert_close(found, exact(text).logits[:, 11:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("kind", ["mamba2", "lstm"])
def test_auto_classes(kind: str, options: dict[str, Any], gpu: Any, tmp_path: Path) -> None:
    """A padded batch: generated tokens, the loss with its gradients, and a saved model."""
    text = random_tokens(3, 9)
    mask = torch.ones_like(text)
    mask[0, :4] = 0
    settings = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False, **options}
    exact = build_auto(kind)
    wanted = exact.generate(text, attention_mask=mask, **settings)
    with gpu:
        model = build_auto(kind).to("cuda")
        there = {"attention_mask": mask.to("cuda")}
        found = model.generate(text.to("cuda"), **there, **settings).tolist()
        output = model(text.to("cuda"), labels=text.to("cuda"), **there, output_hidden_states=True)
        output.loss.backward()
        assert all(one.grad is not None and one.grad.is_cuda for one in model.parameters())
        model.save_pretrained(tmp_path)
        loss = output.loss.item()
    assert found == wanted.tolist()
    exact_loss = exact(text, labels=text, attention_mask=mask).loss.item()
    assert loss == pytest.approx(exact_loss, rel=1e-5)
