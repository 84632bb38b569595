"""The recurrent language model: its logits, its architecture, its errors and its fingerprint."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.memory import LiveBytes
from longrnn import mitigation
from longrnn.cells import MIXERS
from longrnn.models import Rows
from tests.contracts.builders import (
    VOCAB,
    assert_near,
    assert_trees_equal,
    build_model,
    random_state,
    random_tokens,
)
from tests.contracts.subjects import random_masks, small_chunks


@pytest.mark.parametrize("keep", [None, 0, 1, 64, 65, 199, 200, 201, 10**9])
@pytest.mark.parametrize("masks", [(), random_masks(2, 200)], ids=["tokens", "padding"])
def test_keep_returns_the_last_logits(keep: int | None, masks: tuple[Tensor, ...]) -> None:
    """For any number of segments, with the same final state; padding counts like tokens."""
    model, given = build_model("gru", "learned"), Rows(*masks) if masks else None
    tokens, state = random_tokens(2, 200), model.init_state(2)
    whole, after = model(tokens, state, rows=given)
    seen: list[int] = []
    hook = model.head.register_forward_hook(lambda _, args, output: seen.append(output.shape[1]))
    rows = 200 if keep is None else min(keep, 200)
    with small_chunks():  # segments of 64 tokens
        logits, kept_after = model(tokens, state, keep=keep, rows=given)
    hook.remove()
    assert masks or seen == [rows]  # no other logits are computed
    assert logits.shape == (2, rows, VOCAB)
    assert_near(logits, whole[:, 200 - rows :], 1e-12)
    assert_trees_equal(kept_after, after)


@pytest.mark.parametrize("kind", list(MIXERS))
def test_fingerprint(kind: str) -> None:
    """It is equal for equal models; any weight, dtype or option changes it, a call does not."""
    model: Any = build_model(kind, "random")
    twin = build_model(kind, "random")
    known = model.fingerprint()
    assert len(known) == 16
    model(random_tokens(1, 3))
    assert twin.fingerprint() == model.fingerprint() == known
    for parameter in model.parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.view(-1)[-1] += 1e-6
        assert model.fingerprint() != known
        with torch.no_grad():
            parameter.copy_(kept)
    assert model.fingerprint() == known
    model.position.table[0, 0] += 1e-6
    assert model.fingerprint() != known
    assert twin.float().fingerprint() != known
    assert build_model(kind, "random", norm_eps=1e-6).fingerprint() != known


@pytest.mark.parametrize("block", ["plain", "residual"])
def test_a_head_with_a_bias_and_a_wide_embedding(block: str) -> None:
    """Logits are those without the bias plus the bias, and losses are those of the logits."""
    model = build_model("gru", "duplicate", block, tie_embeddings=False, d_embedding=5)
    biased = build_model(
        "gru", "duplicate", block, tie_embeddings=False, d_embedding=5, head_bias=True
    )
    biased.load_state_dict({**model.state_dict(), "head.bias": torch.arange(VOCAB) / 3.0})
    tokens, state = random_tokens(2, 30), random_state(model, 2)
    logits, after = biased(tokens, state)
    assert_near(logits, model(tokens, state).logits + torch.arange(VOCAB) / 3.0, 1e-12)
    targets = tokens.roll(-1, 1)
    losses, lost = biased.token_losses(tokens, targets, state)
    expected = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
    assert_near(losses, expected, 1e-12)
    assert_near(lost.layers[1].h, after.layers[1].h, 1e-12)
    assert biased.fingerprint() != model.fingerprint()


@pytest.mark.parametrize("wide", [True, False])
def test_the_residual_stream_is_float32_if_the_configuration_says_so(wide: bool) -> None:
    model, seen = build_model(dtype=torch.bfloat16, residual_in_fp32=wide), []
    model.blocks[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    model(random_tokens(1, 3))
    assert seen == [torch.float32 if wide else torch.bfloat16]


@pytest.mark.parametrize("spec", ["none", "forget_more"])
def test_a_prefill_holds_one_segment_at_a_time(spec: str) -> None:
    """Live memory grows with the prompt by less than two numbers per token."""
    model = build_model("mamba2", dtype=torch.float32).under(mitigation(spec))
    peaks = []
    for time in (4096, 32768):
        tokens = random_tokens(1, time)
        with torch.no_grad(), LiveBytes(list(model.parameters())) as live:
            model(tokens, keep=1)
        peaks.append(live.peak)
    assert peaks[1] - peaks[0] < 8 * 32768
