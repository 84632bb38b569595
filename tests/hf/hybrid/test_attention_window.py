"""`attention_window`: the attention layers of a hybrid read the last tokens only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load
from longrnn.errors import UserError
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.hf.hybrid.model import HybridLM
from longrnn.state import leaves
from tests.hf.foreign import architecture, assert_continues, causal, tokens, with_bytes

WINDOW = 5
# Architectures whose attention layers all have a window already, or that have none.
WITHOUT = ["recurrent_gemma", "xlstm"]


def banded(theirs: Any, text: torch.Tensor) -> torch.Tensor:
    """The logits of transformers without a cache, with a mask of the window."""
    steps = torch.arange(text.shape[1])
    distance = steps[:, None] - steps
    seen = ((distance >= 0) & (distance < WINDOW))[None, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    masks = {"full_attention": mask, "linear_attention": None}
    with torch.no_grad():
        return theirs(input_ids=text, attention_mask=masks, use_cache=False).logits


@pytest.mark.parametrize("kind", sorted({*FAMILIES} - {*WITHOUT}))
def test_pieces_equal_one_call_with_a_mask(kind: str) -> None:
    """Calls of any length and rows of different lengths read the window exactly."""
    theirs, text = architecture(kind), tokens(2, 30, seed=3) % 60
    model = open_hugging_face(theirs)
    assert isinstance(model, HybridLM)
    full = model(text).logits
    plain, model = model, model.with_attention_window(WINDOW)
    assert torch.equal(plain(text).logits, full)
    assert (plain.max_length, model.max_length) == (128, None)
    expected = banded(theirs, text)
    assert not torch.allclose(expected, full, atol=1e-6)
    assert_continues(model, text, expected, 1e-5)
    for one, other in ((plain, model), (model, plain)):
        with pytest.raises(UserError, match="attention_window"):
            other(text[:, 20:], one(text[:, :20]).state)


def test_it_goes_with_a_mitigation_beyond_the_configured_length(tmp_path: Path) -> None:
    """The state stops growing, the length is not limited, and the fingerprint is another one."""
    folder = with_bytes(causal("falcon_h1", vocab_size=256), tmp_path / "hybrid")
    plain = load(folder)
    model = load(f"{folder}+attention_window(window=16)+state_norm(threshold=1)")
    assert isinstance(model, HybridLM)
    assert model.mitigation is not None
    assert (plain.max_length, model.max_length) == (128, None)
    assert model.under(None).fingerprint() != plain.fingerprint()
    state = model(tokens(1, 200)).state
    assert state.layers[0].keys.entries.shape[-2] == 15


@pytest.mark.parametrize("kind", ["falcon_h1", "mistral"])
def test_a_state_holds_no_more_memory_than_its_size(kind: str) -> None:
    """Neither where it is given a window nor where the architecture has one."""
    model = open_hugging_face(architecture(kind))
    if isinstance(model, HybridLM):
        model = model.with_attention_window(WINDOW)
    state = model(tokens(2, 100) % 60).state
    assert all(leaf.untyped_storage().nbytes() <= leaf.nbytes for _, leaf in leaves(state))


@pytest.mark.parametrize("window", [1, 129])
def test_a_window_out_of_range_is_refused(window: int) -> None:
    with pytest.raises(UserError, match="128"):
        HybridLM(architecture("bamba")).with_attention_window(window)


@pytest.mark.parametrize("kind", WITHOUT)
def test_a_model_without_full_attention_is_refused(kind: str) -> None:
    with pytest.raises(UserError, match="without a window"):
        HybridLM(architecture(kind)).with_attention_window(WINDOW)
