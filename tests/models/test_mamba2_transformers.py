"""Mamba-2 equals `transformers`, and its mixer equals the equations in float64."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import load
from longrnn.cells.mamba2 import Mamba2, Mamba2State
from longrnn.models import RecurrentLM
from tests.contracts.builders import assert_near, build_mixer, random_tree, stirred

pytestmark = pytest.mark.core

VOCAB, D_MODEL, D_STATE, HEAD_DIM, LAYERS, CHUNK = 50, 16, 8, 4, 2, 16


def peers(n_groups: int, tied: bool, **options: Any) -> tuple[RecurrentLM, torch.nn.Module]:
    """Our model and the Hugging Face model with the same non-trivial weights."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=D_MODEL,
        num_hidden_layers=LAYERS,
        state_size=D_STATE,
        head_dim=HEAD_DIM,
        num_heads=2 * D_MODEL // HEAD_DIM,
        expand=2,
        n_groups=n_groups,
        chunk_size=CHUNK,
        tie_word_embeddings=tied,
        **options,
    )
    torch.manual_seed(0)
    theirs: Any = stirred(Mamba2ForCausalLM(config).eval(), seed=1)
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load(folder)
    assert isinstance(ours, RecurrentLM)
    return ours, theirs


def random_tokens(batch: int, time: int) -> Tensor:
    return torch.randint(VOCAB, (batch, time), generator=torch.Generator().manual_seed(time))


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("n_groups", [1, 2])
def test_logits_equal_transformers(n_groups: int, tied: bool) -> None:
    """For one token, less than a chunk, and lengths that are not multiples of a chunk."""
    ours, theirs = peers(n_groups, tied)
    for time in (1, 7, 65, 200):
        tokens = random_tokens(2, time)
        expected = theirs(tokens, use_cache=False).logits
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(ours(tokens).logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("n_groups", [1, 2])
def test_several_calls_equal_transformers(n_groups: int) -> None:
    """A prefill in two calls, then single tokens, with our state and their cache."""
    ours, theirs = peers(n_groups, tied=False)
    tokens = random_tokens(2, 60)
    state, cache, logits = None, None, torch.empty(0)
    for piece in tokens.split([33, 25, 1, 1], dim=1):
        logits, state = ours(piece, state)
        output = theirs(piece, cache_params=cache, use_cache=True)
        cache = output.cache_params
        torch.testing.assert_close(logits, output.logits, rtol=1e-4, atol=1e-4)
    whole = theirs(tokens, use_cache=False).logits[:, -1:]
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


# `transformers` computes the scan, both norms and the logits in float32 whatever the weights'
# dtype (`hidden_states.float()` in mamba2_chunk_scan), so a float64 comparison would show its
# rounding and not ours. The float64 reference are the equations written out.


def written_out(
    mixer: Mamba2, x: Tensor, state: Mamba2State, dt_limit: list[float] | None
) -> tuple[Tensor, Mamba2State]:
    """Mamba-2 (arXiv 2405.21060, section 7), computed per row, token and head."""
    weights = mixer.state_dict()
    width, inner = mixer.d_conv, mixer.d_inner
    group_size = mixer.n_groups * mixer.d_state
    rows, convs, ssms = [], [], []
    for b in range(len(x)):
        recent, h, row = list(state.conv[b]), state.ssm[b].clone(), []
        for t in range(x.shape[1]):
            projected = weights["in_proj.weight"] @ x[b, t]
            if "in_proj.bias" in weights:
                projected = projected + weights["in_proj.bias"]
            z, xBC, dt = projected.split([inner, inner + 2 * group_size, mixer.n_heads])

            recent.append(xBC)
            window = torch.stack(recent[-width:], dim=1)
            xBC = (window * weights["conv1d.weight"][:, 0]).sum(1)
            if "conv1d.bias" in weights:
                xBC = xBC + weights["conv1d.bias"]
            xBC = xBC / (1 + torch.exp(-xBC))
            u, B, C = xBC.split([inner, group_size, group_size])

            dt = torch.log1p(torch.exp(dt + weights["dt_bias"]))
            if dt_limit is not None:
                dt = dt.clamp(dt_limit[0], dt_limit[1])
            y = torch.empty(inner, dtype=x.dtype)
            for head in range(mixer.n_heads):
                group = head * mixer.n_groups // mixer.n_heads
                shared = slice(group * mixer.d_state, (group + 1) * mixer.d_state)
                own = slice(head * mixer.head_dim, (head + 1) * mixer.head_dim)
                A = -torch.exp(weights["A_log"][head])
                h[head] = torch.exp(dt[head] * A) * h[head]
                h[head] = h[head] + dt[head] * torch.outer(u[own], B[shared])
                y[own] = h[head] @ C[shared] + weights["D"][head] * u[own]

            y = y * z / (1 + torch.exp(-z))
            grouped = y.view(mixer.n_groups, -1)
            mean_square = grouped.square().mean(1, keepdim=True)
            y = (grouped / (mean_square + mixer.norm_eps).sqrt()).view(-1)
            out = weights["out_proj.weight"] @ (y * weights["norm.weight"])
            row.append(out + weights["out_proj.bias"] if "out_proj.bias" in weights else out)
        rows.append(torch.stack(row))
        kept = recent[len(recent) - (width - 1) :]
        convs.append(torch.stack(kept) if kept else state.conv[b])
        ssms.append(h)
    return torch.stack(rows), Mamba2State(torch.stack(convs), torch.stack(ssms))


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"d_state": 5, "head_dim": 4},
        {"d_state": 5, "head_dim": 4, "n_groups": 2, "dt_limit": [0.02, 0.2]},
        {"d_state": 3, "head_dim": 8, "n_groups": 2, "bias": True, "conv_bias": False},
        {"d_state": 3, "head_dim": 16, "d_conv": 1, "norm_eps": 1e-2, "backend": "torch"},
    ],
    ids=["plain", "groups-limit", "bias", "no-conv"],
)
@pytest.mark.parametrize("time", [1, 70])
def test_the_mixer_equals_the_equations(options: dict[str, Any], time: int) -> None:
    """In float64, from a non-zero state, to 1e-9."""
    mixer = build_mixer({"kind": "mamba2", **options})
    assert isinstance(mixer, Mamba2)
    x = random_tree(torch.empty(2, time, mixer.d_input, dtype=torch.float64), 1)
    state = random_tree(mixer.init_state(2), 2)
    expected, final = written_out(mixer, x, state, options.get("dt_limit"))
    y, after = mixer(x, state)
    assert_near(y, expected, 1e-9, "y")
    assert_near(after.conv, final.conv, 1e-9, "conv")
    assert_near(after.ssm, final.ssm, 1e-9, "ssm")


def test_a_change_of_the_given_list_does_not_change_the_cell() -> None:
    """The C++ kernels keep the numbers from the first token on."""
    limit = [0.01, 0.05]
    mixer = build_mixer({"kind": "mamba2", "d_state": 5, "head_dim": 4, "dt_limit": limit})
    limit[1] = 0.5
    assert mixer.dt_limit == (0.01, 0.05)


def test_dt_limit_has_an_effect() -> None:
    """The limits used above lie inside the range of dt."""
    plain, limited = (
        build_mixer({"kind": "mamba2", "d_state": 5, "head_dim": 4, "dt_limit": limit})
        for limit in (None, [0.02, 0.2])
    )
    x = random_tree(torch.empty(1, 9, plain.d_input, dtype=torch.float64), 1)
    assert not torch.equal(plain(x, plain.init_state(1))[0], limited(x, limited.init_state(1))[0])


def test_initial_dt_and_decay() -> None:
    """Initial softplus(dt_bias) lies in [dt_min, dt_max], and initial −A in A_init."""
    mixer = Mamba2(16, 16, head_dim=1, dt_min=0.01, dt_max=0.02, A_init=[2.0, 3.0])
    dt = torch.nn.functional.softplus(mixer.dt_bias)
    assert 0.01 - 1e-6 <= dt.min() < dt.max() <= 0.02 + 1e-6
    assert 2 - 1e-6 <= mixer.A_log.exp().min() < mixer.A_log.exp().max() <= 3 + 1e-6
