"""Small models of every kind, and the comparisons that the contract tests share.

The contract tests run over the registries: a new entry is tested once it is registered. Only an
entry whose defaults do not suit a small model needs a line in the tables below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import strategies as st
from longrnn.ops.ssd import BACKENDS, chunked, rescale, window, window_carry
from torch import Tensor, nn

from longrnn.cells import MIXERS, Cell, Edit
from longrnn.mitigations import MITIGATIONS, Mitigated, mitigation
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.models.recurrent import BLOCKS
from longrnn.positions import POSITIONS
from longrnn.state import LMState, PyTree, leaves, tree_map

ModuleT = TypeVar("ModuleT", bound=nn.Module)

VOCAB = 11
D_MODEL = 8
LONGEST = 300

MIXER_OPTIONS: dict[str, dict[str, Any]] = {"mamba2": {"d_state": 6, "head_dim": 4, "n_groups": 2}}
POSITION_OPTIONS: dict[str, dict[str, Any]] = {
    "learned": {"max_length": 2 * LONGEST},
    "random": {"max_length": 2 * LONGEST},
}
# Options that have a clear effect on a small model.
MITIGATION_OPTIONS: dict[str, dict[str, Any]] = {
    "forget_more": {"decay_scale": 0.9, "input_scale": 0.75},
    "power_decay": {"scale": 1.3},
    "scale_decay": {"scale": 1.5},
    "scale_delta": {"scale": 0.7},
    "sliding_window": {"window": 7, "heads": [0]},
    "state_norm": {"threshold": 0.5},
    "token_filter": {"threshold": 0.05},
}
# Options that run code of their own.
MORE_MIXERS: list[dict[str, Any]] = [
    {"kind": "rnn", "nonlinearity": "relu"},
    {"kind": "rnn", "nonlinearity": "identity"},
    {"kind": "mamba2", "d_state": 5, "head_dim": 8, "backend": "reference", "d_conv": 1},
    {"kind": "mamba2", "d_state": 5, "head_dim": 16, "bias": True, "conv_bias": False, "d_conv": 2},
    {"kind": "mamba2", "d_state": 3, "head_dim": 2, "n_groups": 4, "dt_limit": [0.01, 0.05]},
]

BLOCK_KINDS = sorted(BLOCKS)
# Relative to the largest entry of the tensor compared.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = list(TOLERANCE)


def with_positions(cases: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    """Cases of cells and mitigations, each with a position encoding as its last argument.

    A cell without a mitigation is combined with every encoding. The others have one each, in turns:
    an encoding changes the input of the first cell, and no mitigation sees it.
    """
    kinds, found = list(POSITIONS), []
    for number, (name, (specs, mixer)) in enumerate(cases.items()):
        plain = all(spec["kind"] == "none" for spec in specs)
        for position in kinds if plain else [kinds[number % len(kinds)]]:
            found.append(pytest.param(specs, mixer, position, id=f"{name}-{position}"))
    return found


def mixer_spec(kind: str) -> dict[str, Any]:
    return {"kind": kind, **MIXER_OPTIONS.get(kind, {})}


def position_spec(kind: str) -> dict[str, Any]:
    return {"kind": kind, **POSITION_OPTIONS.get(kind, {})}


def mitigation_spec(kind: str) -> dict[str, Any]:
    return {"kind": kind, **MITIGATION_OPTIONS.get(kind, {})}


# Mitigations with every kind of cell for which they are defined, and those for which they are not.
DEFINED, UNDEFINED = (
    [
        (mitigation_spec(kind), mixer_spec(mixer))
        for kind, member in MITIGATIONS.items()
        for mixer, cell in MIXERS.items()
        if (member.undefined(cell) is None) == defined
    ]
    for defined in (True, False)
)
MIXER_SPECS = [mixer_spec(kind) for kind in MIXERS] + MORE_MIXERS
POSITION_SPECS = [position_spec(kind) for kind in POSITIONS]


def spec_id(spec: object) -> str:
    """The id of a parametrised test: `mamba2-d_conv=1`; a dtype prints as itself."""
    if not isinstance(spec, dict):
        return str(spec).removeprefix("torch.")
    options = [f"{name}={value}" for name, value in spec.items() if name != "kind"]
    return "-".join([spec["kind"], *options]).replace(" ", "")


@contextmanager
def small_chunks(chunk: int = 4, chunks_at_once: int = 2) -> Iterator[None]:
    """Cuts time into chunks so small that short texts reach every edge between them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (chunked, rescale, window_carry):
            patch.setattr(module, "CHUNK", chunk)
        for module in (chunked, rescale):
            patch.setattr(module, "SEGMENT", chunk * chunks_at_once)
        patch.setattr(window, "CHUNKS_AT_ONCE", chunks_at_once)
        yield


# The backends with code of their own for a window and for a limit on the norm of the state.
WITH_KERNELS = [name for name in ("chunked", "native") if name in BACKENDS]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stirred(module: ModuleT, seed: int) -> ModuleT:
    """Adds noise to every parameter, so that none is trivial (D = 1, a bias of 0)."""
    randomness = generator(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=randomness, dtype=torch.float64)
            parameter.add_(0.1 * noise)
    return module


def build_mixer(spec: dict[str, Any], dtype: torch.dtype = torch.float64, seed: int = 0) -> Cell:
    """A mixer with input width D_MODEL + 2 and output width D_MODEL."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        mixer = MIXERS.build(spec, D_MODEL + 2, D_MODEL)
    return stirred(mixer.to(dtype), seed)


def build_model(
    mixer: str | dict[str, Any] = "mamba2",
    position: str = "none",
    block: str = "residual",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **config: Any,
) -> RecurrentLM:
    spec = mixer_spec(mixer) if isinstance(mixer, str) else mixer
    settings = {"vocab_size": VOCAB, "d_model": D_MODEL, "n_layers": 2, **config}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = RecurrentLM(
            RecurrentConfig(mixer=spec, position=position_spec(position), block=block, **settings)
        )
    return stirred(model.to(dtype), seed)


def build_mitigated(
    specs: Sequence[dict[str, Any]], mixer: str | dict[str, Any] = "mamba2", **model: Any
) -> Mitigated:
    """`build_model` under mitigations."""
    return Mitigated(build_model(mixer, **model), [mitigation(spec) for spec in specs])


def recurrent(model: Mitigated) -> RecurrentLM:
    """The recurrent model under a mitigation."""
    assert isinstance(model.model, RecurrentLM)
    return model.model


def random_tokens(batch: int, time: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (batch, time), generator=generator(seed))


def random_tree(like: PyTree, seed: int = 0) -> PyTree:
    """A tree like `like`, on its device: normal where it is real, small counts otherwise."""
    randomness = generator(seed)

    def draw(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            drawn = torch.randint(100, leaf.shape, generator=randomness, dtype=leaf.dtype)
            return drawn.to(leaf.device)
        wide = torch.randn(leaf.shape, generator=randomness, dtype=torch.float64)
        return wide.to(leaf.device, leaf.dtype)

    return tree_map(draw, like)


def random_state(model: RecurrentLM, batch: int, seed: int = 0) -> LMState:
    return random_tree(model.init_state(batch), seed)


def random_start(model: Mitigated, batch: int, seed: int = 0) -> LMState:
    """An initial state with random memories and the initial carry."""
    state = model.init_state(batch)
    return state._replace(layers=random_tree(state.layers, seed))


def functional(tree: PyTree, seed: int) -> Tensor:
    """A random linear functional of the real leaves of a tree."""
    weights = random_tree(tree, seed)
    pairs = zip(leaves(tree), leaves(weights), strict=True)
    terms = [(leaf * weight).sum() for (_, leaf), (_, weight) in pairs if leaf.is_floating_point()]
    return torch.stack(terms).sum()


def differentiable(tree: PyTree) -> PyTree:
    """A copy whose real leaves collect gradients."""
    return tree_map(
        lambda leaf: leaf.clone().requires_grad_() if leaf.is_floating_point() else leaf, tree
    )


def real_leaves(tree: PyTree, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": leaf for name, leaf in leaves(tree) if leaf.is_floating_point()}


def mixer_outcome(
    mixer: Cell, x: Tensor, state: PyTree, sizes: Sequence[int], edit: Edit | None = None
) -> dict[str, Tensor]:
    """Outputs, final state and every gradient of a mixer run in pieces, by name."""
    x, state = differentiable(x), differentiable(state)
    outputs, after = [], state
    for piece in x.split(list(sizes), dim=1):
        y, after = mixer(piece, after, edit)
        outputs.append(y)
    y = torch.cat(outputs, dim=1)
    inputs = {"x": x, **real_leaves(state, "state."), **parameters(mixer)}
    return {"y": y, **real_leaves(after, "final ")} | gradients((y, after), inputs)


def model_outcome(
    model: RecurrentLM | Mitigated, tokens: Tensor, state: LMState, sizes: Sequence[int]
) -> dict[str, Tensor]:
    """Like `mixer_outcome` for a language model, with the final position."""
    state = differentiable(state)
    outputs, after = [], state
    for piece in tokens.split(list(sizes), dim=1):
        logits, after = model(piece, after)
        outputs.append(logits)
    logits = torch.cat(outputs, dim=1)
    inputs = {**real_leaves(state, "state."), **parameters(model)}
    result = {"logits": logits, "position": after.position, **real_leaves(after, "final ")}
    return result | gradients((logits, after), inputs)


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {f"parameter {name}": value for name, value in module.named_parameters()}


def gradients(outputs: PyTree, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a random functional of the outputs; 0 where an input is not used."""
    found = torch.autograd.grad(
        functional(outputs, seed=99), list(inputs.values()), materialize_grads=True
    )
    return {f"gradient of {name}": g for name, g in zip(inputs, found, strict=True)}


def assert_near(
    actual: Tensor, expected: Tensor, tolerance: float, name: str = "", scale: float = 0.0
) -> None:
    """Equal to `tolerance`, relative to `scale` or the largest entry of `expected`."""
    assert actual.shape == expected.shape, name
    if not actual.numel():
        return
    if not actual.is_floating_point():
        assert torch.equal(actual, expected), name
        return
    assert expected.isfinite().all(), f"{name}: not finite"
    error = (actual.double() - expected.double()).abs().max().item()
    scale = max(scale, expected.double().abs().max().item())
    # Written so that a NaN fails.
    assert error <= tolerance * scale, f"{name}: {error:.2e} away, scale {scale:.2e}"


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Equal tensor by tensor, to the tolerance of `dtype`.

    In float32 the gradients of the parameters share one scale: each is a sum over all tokens, and
    where a small one (D has one entry per head) cancels, its size does not bound its rounding.
    """
    assert actual.keys() == expected.keys()
    of_parameters = [name for name in expected if name.startswith("gradient of parameter")]
    shared = max((expected[name].abs().max().item() for name in of_parameters), default=0.0)
    for name in expected:
        scale = shared if dtype == torch.float32 and name in of_parameters else 0.0
        assert_near(actual[name], expected[name], TOLERANCE[dtype], name, scale)


def assert_trees_equal(actual: PyTree, expected: PyTree) -> None:
    """Bit for bit, NaN equal to NaN."""
    ours, theirs = dict(leaves(actual)), dict(leaves(expected))
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        assert leaf.dtype == theirs[name].dtype, name
        torch.testing.assert_close(
            leaf, theirs[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@st.composite
def splits(draw: st.DrawFn, *, empty: bool, longest: int = LONGEST) -> list[int]:
    """Sizes of the pieces of 1 to `longest` tokens, a run of single tokens among them.

    Args:
        empty: whether pieces of no token may occur.
        longest: how long the whole may be.
    """
    time = draw(st.integers(1, longest))
    cuts = draw(st.lists(st.integers(0, time), max_size=5))
    first = draw(st.integers(0, time))
    cuts += range(first, min(first + draw(st.integers(1, 5)), time))
    bounds = sorted([0, *cuts, time])
    sizes = [stop - start for start, stop in pairwise(bounds)]
    return sizes if empty else [size for size in sizes if size]
