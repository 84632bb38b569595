"""The residual connection and the norm after it in one kernel, alone and between the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longrnn.models import RecurrentLM, blocks
from longrnn.models.decoding import StaticDecoder
from longrnn.models.quantise import quantise
from longrnn.models.vectors import Vectors
from longrnn.ops import triton as kernels
from longrnn.ops.norm import add_rms_norm
from longrnn.state import leaves
from tests.contracts.builders import (
    DTYPES,
    assert_near,
    build_model,
    generator,
    mixer_spec,
    random_tokens,
    random_tree,
    spec_id,
)
from tests.ops.triton.fused import assert_fused, normal
from tests.ops.triton.launches import launches

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not kernels.interpreting(), reason="kernels run on the GPU here: see tests/cuda"
)
EPS = 1e-5


def added(x: Tensor, branch: Tensor, weight: Tensor, *, fused: bool) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, branch, weight, EPS, fused=fused)


@pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
@pytest.mark.parametrize("shape", [(2, 5, 24), (1, 1, 6)], ids=str)
def test_sum_and_norm(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both outputs and all gradients, for views; with more rows than programs among them."""
    from longrnn.ops.triton import residual

    monkeypatch.setattr(residual, "PROGRAMS", 3)
    d = shape[-1]

    def run(x: Tensor, wide: Tensor, weight: Tensor, *, fused: bool) -> tuple[Tensor, Tensor]:
        return added(x, wide[..., 1:-1], weight, fused=fused)

    assert_fused(run, [normal(*shape), normal(*shape[:-1], d + 2), normal(d)], dtype)


@pytest.mark.parametrize("output", [0, 1], ids=["sum", "norm"])
def test_one_output_alone(output: int) -> None:
    """The other one may be unused, as the sum is after the last layer."""

    def run(x: Tensor, branch: Tensor, weight: Tensor, *, fused: bool) -> Tensor:
        return added(x, branch, weight, fused=fused)[output]

    assert_fused(run, [normal(2, 3, 6), normal(2, 3, 6, seed=1), normal(6)], torch.float64)


def test_second_derivatives() -> None:
    """They are those of torch's operators."""

    def run(x: Tensor, branch: Tensor, weight: Tensor, *, fused: bool) -> Any:
        total, normed = added(x, branch, weight, fused=fused)
        squares = total.square().sum() + normed.pow(3).sum()
        return torch.autograd.grad(squares, [x, branch, weight], create_graph=True)

    assert_fused(run, [normal(1, 2, 4), normal(1, 2, 4, seed=1), normal(4)], torch.float64)


@pytest.mark.parametrize("norm", [None, torch.bfloat16], ids=["as the sum", "narrow"])
@pytest.mark.parametrize(
    ("stream", "branch"),
    [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
)
def test_dtypes(stream: str, branch: str, norm: torch.dtype | None) -> None:
    """The sum is as wide as its parts; each gradient has the dtype of what was given."""
    tensors = [
        normal(2, 3, 10).detach().to(getattr(torch, stream)),
        normal(2, 3, 10, seed=1).detach().to(getattr(torch, branch)),
        normal(10).detach().float(),
    ]

    def outcome(fused: bool) -> list[Tensor]:
        given = [one.clone().requires_grad_() for one in tensors]
        x, y, weight = given
        total, normed = add_rms_norm(x, y, weight, EPS, dtype=norm, fused=fused)
        loss = total.float().pow(3).sum() + normed.float().square().sum()
        return [total, normed, *torch.autograd.grad(loss, given)]

    for ours, theirs in zip(outcome(True), outcome(False), strict=True):
        assert ours.dtype == theirs.dtype
        assert_near(ours, theirs.double(), 2**-6 if ours.dtype == torch.bfloat16 else 2**-7)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run wherever they would run for tensors on a GPU."""
    plain = kernels.runs

    def runs(fused: bool | None, *tensors: Tensor | None) -> bool:
        return plain(fused is not False, *tensors)

    monkeypatch.setattr(kernels, "runs", runs)


KERNELS = {**mixer_spec("mamba2"), "backend": "triton"}
MODELS: dict[str, Callable[[], RecurrentLM]] = {
    "mamba2": lambda: build_model("mamba2"),
    "gru": lambda: build_model("gru"),
    "wide": lambda: build_model("lstm", residual_in_fp32=True),
    "plain": lambda: build_model("gru", block="plain"),
}


@pytest.mark.parametrize("again", ["no", "block", "segment"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, again: str, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, states and gradients of padded and packed rows, whatever is recomputed."""
    model, tokens = MODELS[name](), random_tokens(2, 6)
    model.gradient_checkpointing_enable(again)
    given = random_tree(model.init_state(2), 1)
    is_token, starts = torch.ones(2, 6, dtype=torch.bool), torch.zeros(2, 6, dtype=torch.bool)
    is_token[0, 2] = is_token[1, 5] = False
    starts[0, 4] = True

    def outcome() -> list[Tensor]:
        found = model(tokens, given, is_token=is_token, is_document_start=starts, keep=5)
        grads = torch.autograd.grad(found.logits.square().sum(), list(model.parameters()))
        return [found.logits, *(leaf for _, leaf in leaves(found.state)), *grads]

    ours = outcome()
    monkeypatch.setattr(kernels, "runs", lambda fused, *tensors: False)
    for one, exact in zip(ours, outcome(), strict=True):
        assert_near(one, exact, 1e-10)


def test_vectors_between_layers_are_sums(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read between layers is the residual stream, as without the kernel."""
    model, tokens = build_model("gru", n_layers=3), random_tokens(2, 4)

    def outcome() -> list[Tensor]:
        found: list[Tensor] = []

        def read(number: int, x: Tensor) -> Tensor:
            found.append(x)
            return x

        model(tokens, vectors=Vectors(on_layer=read))
        return found

    ours = outcome()
    assert len(ours) == 4
    monkeypatch.setattr(kernels, "runs", lambda fused, *tensors: False)
    for one, exact in zip(ours, outcome(), strict=True):
        assert_near(one, exact, 1e-12)


def per_layer(count: Callable[[RecurrentLM], int]) -> int:
    """What one more layer adds to a count."""
    one, two = (count(build_model(KERNELS, n_layers=layers)) for layers in (1, 2))
    return two - one


@torch.no_grad()
def test_launches_of_a_decoded_token(as_on_a_gpu: None) -> None:
    """Five per layer: norm, two projections, the cell and its norm. States are copied at once."""

    def count(model: RecurrentLM) -> int:
        static, token = StaticDecoder(model, model.init_state(1)), random_tokens(1, 1)[0]
        static.step(token, None)
        return launches(lambda: static.step(token, None)).total()

    assert per_layer(count) == 5


def test_no_sum_is_launched_between_layers(as_on_a_gpu: None) -> None:
    """In the forward pass; the backward pass adds gradients of the stream in its kernel too."""
    tokens = random_tokens(1, 2)
    with torch.no_grad():
        model = build_model(KERNELS, n_layers=2)
        names = launches(lambda: model(tokens, keep=1))
    assert names["add_and_normalise"] == 2
    assert names["normalise"] == 3  # the first norm, and those of the cells

    def additions(model: RecurrentLM) -> int:
        return launches(lambda: model(tokens).logits.sum().backward())["aten::add.Tensor"]

    # Gradients of x, which D multiplies too, and of dt, which scales decay and input.
    assert per_layer(additions) == 2


def test_hooks_of_a_layer_read_and_change_tensors(as_on_a_gpu: None) -> None:
    """A layer with hooks receives and returns the residual stream added up."""
    model, tokens = build_model("gru", n_layers=3), random_tokens(2, 4)
    plain = model(tokens).logits
    seen: list[Tensor] = []
    block = model.blocks[1]
    with block.register_forward_hook(lambda _, args, output: seen.extend((args[0], output[0]))):
        hooked = model(tokens).logits
    wanted: list[Tensor] = []
    model(tokens, vectors=Vectors(on_layer=lambda number, x: wanted.append(x) or x))
    assert_near(hooked, plain, 1e-12)
    for one, exact in zip(seen, wanted[1:3], strict=True):
        assert_near(one, exact, 1e-12)
    block.register_forward_pre_hook(lambda _, args: (0 * args[0], *args[1:]))
    assert not torch.allclose(model(tokens).logits, plain)


def quantised(model: RecurrentLM) -> None:
    """Projections with weights in 8 bits."""
    quantise(model, "int8")


def adapted(model: RecurrentLM) -> None:
    """LoRA on the output projections, with weights that are not 0."""
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["out_proj"]), model)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, generator=generator(1))


@torch.no_grad()
@pytest.mark.parametrize("change", [quantised, adapted], ids=lambda one: one.__name__)
def test_other_projections(
    change: Callable[[RecurrentLM], None], as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the output projection is does not matter: its result is added by the next norm."""
    model, tokens = build_model("mamba2", n_layers=3, dtype=torch.float32), random_tokens(2, 5)
    change(model)
    ours = model(tokens)
    monkeypatch.setattr(kernels, "runs", lambda fused, *tensors: False)
    exact = model(tokens)
    assert_near(ours.logits, exact.logits, 1e-5)
    for (name, one), (_, other) in zip(leaves(ours.state), leaves(exact.state), strict=True):
        assert_near(one, other, 1e-5, name)


def test_function_transforms_use_the_operators() -> None:
    """torch.func and forward-mode derivatives see differentiable operations."""
    x, branch, weight = (normal(*shape).detach() for shape in ((2, 3, 6), (2, 3, 6), (6,)))

    def loss(x: Tensor, fused: bool) -> Tensor:
        return torch.cat(added(x, branch, weight, fused=fused)).pow(3).sum()

    gradient = torch.func.grad(loss)(x, True)
    assert_near(gradient, torch.func.grad(loss)(x, False), 1e-12)
    slope = torch.func.jvp(lambda x: loss(x, True), (x,), (branch,))[1]
    assert_near(slope, (gradient * branch).sum(), 1e-12)


@pytest.mark.parametrize("is_fused", [False, True])
def test_autocast_casts_nothing_between_norm_and_projection(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm writes what the first projection reads: the same bits in one pass less."""
    plain = kernels.runs
    monkeypatch.setattr(kernels, "runs", lambda fused, *given: is_fused and plain(True, *given))
    model, tokens = build_model("mamba2", n_layers=3, dtype=torch.float32), random_tokens(2, 5)
    seen: list[torch.dtype] = []
    model.mixers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))

    def outcome() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens).logits
        return [logits, *torch.autograd.grad(logits.float().sum(), list(model.parameters()))]

    ours = outcome()
    monkeypatch.setattr(blocks, "autocasts", lambda x: False)
    for one, exact in zip(ours, outcome(), strict=True):
        assert torch.equal(one, exact)
    assert seen == [torch.bfloat16, torch.float32]
