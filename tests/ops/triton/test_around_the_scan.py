"""The fused kernels beside the recurrence equal torch's operators, in the interpreter.

The comparison is with the operators in float64, whose gradients other tests compare with finite
differences and autograd.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.mixers import Mamba2
from longrnn.ops import triton as kernels
from longrnn.ops.conv import causal_conv
from longrnn.ops.cross_entropy import token_cross_entropy, weighted_cross_entropy
from longrnn.ops.norm import gated_rms_norm, rms_norm
from longrnn.ops.packed_rows import PackedRows
from longrnn.ops.steps import UNLIMITED, step_sizes
from longrnn.state import clone
from tests.contracts.builders import (
    D_MODEL,
    DTYPES,
    MORE_MIXERS,
    TOLERANCE,
    assert_near,
    assert_trees_equal,
    build_mitigated,
    build_mixer,
    build_model,
    generator,
    mixer_spec,
    random_start,
    random_tokens,
    random_tree,
    spec_id,
)
from tests.ops.triton.fused import assert_fused, normal

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not kernels.interpreting(), reason="kernels run on the GPU here: see tests/cuda"
)
MAMBA2 = [mixer_spec("mamba2"), *(one for one in MORE_MIXERS if one["kind"] == "mamba2")]
MAMBA2 = [{**spec, "backend": "triton"} for spec in MAMBA2]


# b, t, c, k: odd lengths, single tokens, more than one tile of channels and of tokens.
CONVOLUTIONS = [(2, 37, 9, 4), (1, 1, 5, 4), (2, 3, 130, 4), (1, 70, 3, 1), (2, 2, 4, 2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
@pytest.mark.parametrize("sizes", CONVOLUTIONS, ids=str)
def test_convolution(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Values, the state after, and all gradients, for views of a wider tensor."""
    b, t, c, k = sizes

    def run(wide: Tensor, *others: Any, fused: bool) -> Any:
        state, weight, bias = others
        x = wide[..., 1 : c + 1]
        return causal_conv(x, weight, bias, state, activation=k > 1, fused=fused)

    bias = normal(c, seed=1) if t % 2 else None
    assert_fused(run, [normal(b, t, c + 3), normal(b, k - 1, c), normal(c, k), bias], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
def test_gated_norm_of_a_sum(dtype: torch.dtype) -> None:
    """D x is added first, where x is a view of the output of the convolution."""

    def run(
        y: Tensor, gate: Tensor, wide: Tensor, D: Tensor, weight: Tensor, *, fused: bool
    ) -> Any:
        inner = wide[..., :12].unflatten(2, (3, 4))
        return gated_rms_norm(y, gate, weight, 1e-5, 2, skip=(inner, D), fused=fused)

    shape = (2, 5, 12)
    tensors = [normal(*shape), normal(*shape, seed=1), normal(2, 5, 20), normal(3), normal(12)]
    assert_fused(run, tensors, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
@pytest.mark.parametrize("limit", [UNLIMITED, (0.3, 1.5)], ids=str)
def test_step_sizes(limit: tuple[float, float], dtype: torch.dtype) -> None:
    """Values and gradients over two tiles of tokens, at large, small and limited steps."""

    def run(wide: Tensor, bias: Tensor, *, fused: bool) -> Any:
        # Inputs are cast to `wide.dtype` by the caller, as weights and states are.
        return step_sizes(5 * wide[..., 2:], bias, limit, wide.dtype, fused=fused)

    assert_fused(run, [normal(2, 37, 5), normal(3)], dtype)


def test_step_sizes_of_narrow_inputs_are_wide() -> None:
    """The gradient of the input has its dtype, and NaN stays NaN."""
    raw = normal(1, 5, 3).detach().bfloat16()
    raw[0, 2, 1] = torch.nan
    raw.requires_grad_()
    bias = normal(3).detach().float()
    found, wanted = (
        step_sizes(raw, bias, (0.0, 1.0), torch.float32, fused=fused) for fused in (True, False)
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, equal_nan=True)
    (grad,) = torch.autograd.grad(found[:, :2].sum(), raw)
    assert grad.dtype == torch.bfloat16


def test_second_derivatives_of_a_fused_norm() -> None:
    """They are those of torch's operators."""

    def run(
        y: Tensor, gate: Tensor, inner: Tensor, D: Tensor, weight: Tensor, *, fused: bool
    ) -> Any:
        found = gated_rms_norm(y, gate, weight, 1e-5, 1, skip=(inner, D), fused=fused)
        given = [y, gate, inner, D, weight]
        return torch.autograd.grad(found.square().sum(), given, create_graph=True)

    tensors = [normal(1, 2, 4), normal(1, 2, 4, seed=1), normal(1, 2, 2, 2), normal(2), normal(4)]
    assert_fused(run, tensors, torch.float64)


def test_a_long_span_of_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the backward pass meet at the border of their spans."""
    from longrnn.ops.triton import convolution

    monkeypatch.setattr(convolution, "SPAN", 16)

    def run(x: Tensor, state: Tensor, weight: Tensor, *, fused: bool) -> Any:
        return causal_conv(x, weight, None, state, activation=True, fused=fused)

    assert_fused(run, [normal(1, 45, 4), normal(1, 3, 4), normal(4, 4)], torch.float64)


def test_packed_rows_of_the_convolution() -> None:
    """No term of the kernel comes from another document."""
    starts = torch.zeros(2, 11, dtype=torch.bool)
    starts[0, [3, 4]] = starts[1, 0] = True
    rows = PackedRows(starts, torch.tensor([11, 8]))

    def run(x: Tensor, state: Tensor, weight: Tensor, *, fused: bool) -> Any:
        y, after = causal_conv(x, weight, None, state, activation=True, rows=rows, fused=fused)
        return rows.without_padding(y), after

    assert_fused(run, [normal(2, 11, 4), normal(2, 3, 4), normal(4, 4)], torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
@pytest.mark.parametrize("shape", [(2, 5, 24), (1, 1, 6)], ids=str)
@pytest.mark.parametrize("groups", [0, 1, 2], ids=["plain", "gated", "groups"])
def test_norms(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and all gradients, for gates that are views; more rows than programs among them."""

    from longrnn.ops.triton import norm

    monkeypatch.setattr(norm, "PROGRAMS", 3)

    def run(x: Tensor, wide: Tensor, weight: Tensor, *, fused: bool) -> Tensor:
        if groups == 0:
            return rms_norm(x, weight, 1e-5, fused=fused)
        return gated_rms_norm(x, wide[..., 1:-1], weight, 1e-5, groups, fused=fused)

    d = shape[-1]
    assert_fused(run, [normal(*shape), normal(*shape[:-1], d + 2), normal(d)], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
@pytest.mark.parametrize("vocab", [1, 37, 5000])
def test_losses(vocab: int, dtype: torch.dtype) -> None:
    """Loss, predictions and gradients in pieces, with unscored tokens."""
    targets = torch.randint(vocab, (2, 4), generator=generator(1))
    targets[0, 1] = -100
    weights = torch.rand(2, 4, generator=generator(2))

    def run(hidden: Tensor, head: Tensor, *, fused: bool) -> Any:
        loss = weighted_cross_entropy(
            hidden, head, targets, weights, max_logits=3 * vocab, fused=fused
        )
        return tuple(loss)

    hidden, head = normal(2, 4, 8), normal(vocab, 8)
    assert_fused(run, [hidden, head], dtype)
    found, wanted = (token_cross_entropy(hidden, head, targets, fused=f) for f in (True, False))
    assert_near(found[0], wanted[0], 1e-12)
    assert torch.equal(found[1], wanted[1])


def test_losses_of_logits_that_are_not_finite() -> None:
    """NaN and +∞ give NaN; −∞ is a probability of 0."""
    from longrnn.ops.triton import loss

    logits = torch.zeros(4, 9, dtype=torch.float64)
    logits[0, 3], logits[1, 2], logits[2, 4] = torch.nan, torch.inf, -torch.inf
    targets = torch.tensor([0, 0, 0, 0])
    wanted = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    found, _, gradient = loss.losses(logits, targets, None)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert gradient is None


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
@pytest.mark.parametrize("spec", MAMBA2, ids=spec_id)
def test_one_token(spec: dict[str, Any], dtype: torch.dtype) -> None:
    """y and both states equal those of the composed operators; the given state is unchanged."""
    mixer = build_mixer(spec, dtype)
    exact = build_mixer({**spec, "backend": "reference"}, torch.float64)
    assert isinstance(mixer, Mamba2)
    x = normal(3, 1, D_MODEL + 2).detach()
    state = random_tree(mixer.init_state(3), 1)
    given = clone(state)
    fused = mixer._token(mixer.in_proj(x.to(dtype)), state)
    assert fused is not None
    y, after = mixer(x.to(dtype), state)
    wide = type(state)(*(leaf.double() for leaf in state))
    wanted, wanted_after = exact(x, wide)
    assert_near(y, wanted, TOLERANCE[dtype])
    for ours, theirs in zip(after, wanted_after, strict=True):
        assert_near(ours, theirs, TOLERANCE[dtype])
    assert_trees_equal(state, given)


@torch.no_grad()
def test_one_token_after_an_infinite_state() -> None:
    """Infinity stays infinite in the heads that hold it, and reaches no other head."""
    spec = {**mixer_spec("mamba2"), "backend": "triton"}
    mixer, exact = (build_mixer({**spec, "backend": one}) for one in ("triton", "reference"))
    state = random_tree(mixer.init_state(1), 1)
    state.ssm[0, 1, 0, 0], state.ssm[0, 2, 0, 0] = torch.inf, torch.nan
    x = normal(1, 1, D_MODEL + 2).detach()
    ours, theirs = mixer(x, state)[1], exact(x, state)[1]
    torch.testing.assert_close(ours.ssm, theirs.ssm, equal_nan=True)


@pytest.mark.parametrize("spec", ["none", "forget_more", "state_norm(threshold=0.5)"])
def test_a_model_with_the_kernels(spec: str) -> None:
    """A prefill, tokens one by one and the gradient equal those of torch's operators."""
    given = {"kind": spec.split("(")[0], **({"threshold": 0.5} if "(" in spec else {})}
    tokens = random_tokens(1, 5)

    def outcome(backend: str) -> list[Tensor]:
        mixer = {**mixer_spec("mamba2"), "backend": backend}
        model = build_mitigated([given], mixer, n_layers=1)
        start = random_start(model, 1)
        logits, after = model(tokens, start)
        grads = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
        with torch.no_grad():
            pieces, state = [], start
            for piece in tokens.split([4, 1], dim=1):
                found, state = model(piece, state)
                pieces.append(found)
        return [logits, torch.cat(pieces, 1), *state.layers[0], *after.layers[0], *grads]

    for ours, theirs in zip(outcome("triton"), outcome("chunked"), strict=True):
        assert_near(ours, theirs, 1e-10)


def test_nothing_runs_in_the_interpreter_by_itself() -> None:
    """A model on a CPU with any other backend uses torch's operators."""
    assert not kernels.runs(None, torch.zeros(1))
    assert kernels.runs(True, torch.zeros(1))
    assert build_model("mamba2").mixers[0].backend_on(torch.device("cpu")) != "triton"  # type: ignore[operator]
