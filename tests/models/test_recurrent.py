"""The recurrent language model: its logits, its architecture, its errors and its fingerprint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.memory import LiveBytes
from longrnn import mitigation
from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.models import RecurrentConfig, RecurrentLM
from tests.contracts.builders import (
    D_MODEL,
    VOCAB,
    assert_near,
    assert_trees_equal,
    build_model,
    random_state,
    random_tokens,
)
from tests.contracts.subjects import small_chunks
from tests.refusals import naming

SMALL = RecurrentConfig(vocab_size=VOCAB, d_model=D_MODEL, mixer={"kind": "rnn"})


@pytest.mark.parametrize("keep", [None, 0, 1, 64, 65, 199, 200, 201, 10**9])
def test_keep_returns_the_last_logits(keep: int | None) -> None:
    """For any number of segments, with the same final state; no other logits are computed."""
    model = build_model("gru")
    tokens, state = random_tokens(2, 200), random_state(model, 2)
    whole, after = model(tokens, state)
    seen: list[int] = []
    hook = model.head.register_forward_hook(lambda _, args, output: seen.append(output.shape[1]))
    rows = 200 if keep is None else min(keep, 200)
    with small_chunks():  # segments of 64 tokens
        logits, kept_after = model(tokens, state, keep=keep)
    hook.remove()
    assert seen == [rows]
    assert logits.shape == (2, rows, VOCAB)
    assert_near(logits, whole[:, 200 - rows :], 1e-12)
    assert_trees_equal(kept_after, after)


MAMBA2: dict[str, Any] = {"kind": "mamba2"}
MAMBA3: dict[str, Any] = {"kind": "mamba3", "head_dim": 4}
DELTANET: dict[str, Any] = {"kind": "gated_deltanet", "value_dim": 4}
REFUSED: list[tuple[dict[str, Any], list[object]]] = [
    ({"mixer": {"kind": "lstn"}}, ["lstn", "lstm"]),
    ({"position": {"kind": "sinusoid"}}, ["sinusoid", "sinusoidal"]),
    ({"block": "residul"}, ["residul", "residual"]),
    ({"mixer": MAMBA2 | {"dstate": 4}}, ["dstate", "d_state"]),
    ({"mixer": {"kind": "gru", "d_state": 4}}, ["d_state", "init"]),
    ({"mixer": {"d_state": 4}}, ["kind"]),
    ({"mixer": MAMBA2 | {"head_dim": 4, "backend": "tocrh"}}, ["tocrh", "torch"]),
    ({"mixer": MAMBA2 | {"d_state": "many"}}, ["d_state", "many"]),
    ({"mixer": MAMBA2 | {"A_init": [1.0]}}, ["A_init"]),
    ({"mixer": MAMBA2 | {"dt_limit": [0.2, 0.1]}}, ["dt_limit", 0.2]),
    ({"mixer": MAMBA2 | {"head_dim": 4, "norm_eps": -1}}, ["norm_eps", -1]),
    ({"vocab_size": 0}, ["vocab_size", 0]),
    ({"d_embedding": D_MODEL + 1}, ["d_embedding", D_MODEL + 1, "tie_embeddings"]),
    ({"mixer": MAMBA2 | {"head_dim": 5}}, ["head_dim", 5, 16]),
    ({"mixer": MAMBA2 | {"head_dim": 4, "n_groups": 3}}, ["n_groups", 3, 4]),
    ({"mixer": {"kind": "gru", "init": "ortogonal"}}, ["ortogonal", "orthogonal"]),
    ({"mixer": {"kind": "rnn", "nonlinearity": "Tanh"}}, ["tanh"]),
    ({"mixer": MAMBA3 | {"head_dim": 5}}, ["head_dim"]),
    ({"mixer": MAMBA3 | {"n_groups": 3}}, ["n_groups"]),
    ({"mixer": {"kind": "mamba", "select_norm_eps": -1.0}}, ["select_norm_eps", -1.0]),
    ({"mixer": MAMBA3 | {"rope_fraction": 1.5}}, ["rope_fraction"]),
    ({"mixer": MAMBA3 | {"d_state": 2}}, ["d_state"]),
    ({"mixer": MAMBA3 | {"backend": "mamba_ssm"}}, ["mamba_ssm"]),
    ({"mixer": DELTANET | {"n_heads": 3, "n_key_heads": 2}}, ["n_key_heads"]),
    ({"mixer": DELTANET | {"value_dim": 5}}, ["value_dim"]),
    ({"mixer": DELTANET | {"key_dim": 0}}, ["key_dim"]),
    ({"mixer": DELTANET | {"backend": "mamba_ssm"}}, ["mamba_ssm"]),
]


@pytest.mark.parametrize(("changes", "names"), REFUSED, ids=str)
def test_options_that_do_not_fit_are_refused(changes: dict[str, Any], names: list[object]) -> None:
    """One sentence names the option, what was given, and the nearest name or the range."""
    with pytest.raises(UserError, match=naming(*names)) as caught:
        RecurrentLM(replace(SMALL, **changes))
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize("position", ["none", "sinusoidal"])
def test_plain_is_the_cell_alone(position: str) -> None:
    """A plain model is embedding → position → cells → head, as in arXiv 2402.00236."""
    model: Any = build_model("lstm", position, "plain", n_layers=1, tie_embeddings=False)
    names = {name.split(".")[0] for name, _ in model.named_parameters()}
    assert names == {"embedding", "blocks", "head"}
    tokens = random_tokens(2, 9)
    x = model.position(model.embedding(tokens), torch.arange(9).expand(2, 9))
    y, _ = model.blocks[0].mixer.cell(x)
    torch.testing.assert_close(model(tokens).logits, y @ model.head.weight.T)


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
