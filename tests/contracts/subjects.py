"""Every cell under every mitigation, and what a call of one gives: values, states, gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn

from longrnn.cells import MIXERS, EditedState, ScanningCell
from longrnn.models import LanguageModel, RecurrentLM, Rows, recurrent
from longrnn.ops import cpu
from longrnn.ops.scan import definition as scan
from longrnn.ops.scan import limit, window
from longrnn.positions import POSITIONS
from longrnn.state import LMState, PyTree, leaves, tree_map
from tests.contracts.builders import (
    BLOCK_KINDS,
    DEFINED,
    DTYPES,
    KINDS_OF_CELLS,
    MIXER_SPECS,
    TOLERANCE,
    Spec,
    assert_near,
    build_mitigated,
    differentiable,
    generator,
    mixer_spec,
    random_state,
    random_tokens,
    random_tree,
    real_leaves,
    spec_id,
)
from tests.sampling import sampled

# The backends of scanning cells that this machine runs, and the names of their kernels' options.
BACKENDS = ["torch"] if cpu.missing() else ["torch", "cpu"]
needs_kernels = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))


class Subject(NamedTuple):
    """A cell under mitigations, in a model with a position encoding and a kind of block."""

    specs: list[Spec]
    mixer: Spec
    position: str = "none"
    block: str = "residual"

    def build(self, dtype: torch.dtype = torch.float64, **more: Any) -> RecurrentLM:
        options = {"position": self.position, "block": self.block, "dtype": dtype, **more}
        options.setdefault("n_layers", 1 if self.specs else 2)  # tests of definitions have two
        return build_mitigated(self.specs, self.mixer, **options)


def _subjects() -> dict[str, Subject]:
    """Every cell; every mitigation with every cell and backend; every encoding and block.

    Encodings and blocks take turns: they change the input of a cell, which no mitigation sees.
    """
    cases: dict[str, tuple[list[Spec], Spec]] = {spec_id(one): ([], one) for one in MIXER_SPECS}
    for spec, mixer in DEFINED:
        if spec["kind"] == "none":
            continue
        cell = MIXERS[mixer["kind"]]
        known = cell.backends() if issubclass(cell, ScanningCell) else []
        for backend in [name for name in BACKENDS if name in known] or [""]:
            name = f"{spec['kind']} {mixer['kind']} {backend}".strip()
            cases[name] = ([spec], mixer | ({"backend": backend} if backend else {}))
    positions, found = list(POSITIONS), {}
    for name, (specs, mixer) in cases.items():
        number = crc32(name.encode())  # by name, so that a new cell does not change that of others
        turn = positions[number % len(positions)], BLOCK_KINDS[number // 64 % len(BLOCK_KINDS)]
        found[name] = Subject(specs, mixer, *turn)
    for position in positions:
        for block in BLOCK_KINDS:
            found[f"{position} {block}"] = Subject([], mixer_spec("mamba2"), position, block)
    return found


SUBJECTS = _subjects()
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
Test = Callable[..., None]


def _is_plain(name: str) -> bool:
    return not SUBJECTS[name.removesuffix("-float64")].specs


def every_subject(test: Test) -> Test:
    """Every cell, encoding and block, and a third of the cells under a mitigation.

    Other tests try other thirds; `test_definitions` tries all pairs of a mitigation and a cell.
    """
    some = sampled(SUBJECTS, 3, salt=test.__name__, always=_is_plain)
    return pytest.mark.parametrize("subject", some)(test)


def every_kind(test: Test) -> Test:
    """Every cell, encoding and block, and every mitigation with some cells."""
    fewer = {
        name: one
        for name, one in SUBJECTS.items()
        if not one.specs or one.mixer["kind"] in KINDS_OF_CELLS
    }
    some = sampled(fewer, 3, salt=test.__name__, always=_is_plain)
    return pytest.mark.parametrize("subject", some)(test)


def every_subject_in_a_dtype(test: Test) -> Test:
    """As `every_subject`; mitigations in float32 are compared with their definitions."""
    cases = {
        f"{name}-{spec_id(dtype)}": (one, dtype)
        for name, one in SUBJECTS.items()
        for dtype in DTYPES
        if dtype == torch.float64 or not one.specs
    }
    some = sampled(
        cases,
        3,
        salt=test.__name__,
        always=lambda name: not name.endswith("32") and _is_plain(name),
    )
    return pytest.mark.parametrize(("subject", "dtype"), some)(test)


@contextmanager
def small_chunks(chunk: int = 4, chunks_at_once: int = 2) -> Iterator[None]:
    """Cuts time into pieces so small that short texts reach every edge between them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (scan, limit):
            patch.setattr(module, "CHUNK", chunk)
            patch.setattr(module, "SEGMENT", chunk * chunks_at_once)
        patch.setattr(window, "FEW_IN_WINDOW", 1)
        for name in ("SEGMENT_TOKENS", "SEGMENT_NUMBERS"):
            patch.setattr(recurrent, name, 1)  # segments of 64 tokens
        yield


def random_masks(batch: int, time: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random `is_token` and `is_document_start`; some rows may be padding only."""
    randomness = generator(seed)

    def chance(limit: float) -> Tensor:
        return torch.rand(batch, time, generator=randomness) < limit

    left, right = (torch.randint(0, time // 3 + 1, (batch, 1), generator=randomness) for _ in "ab")
    index = torch.arange(time)
    is_token = (index >= left) & (index < time - right) & ~chance(0.2)
    is_token &= torch.rand(batch, 1, generator=randomness) < 0.9
    return is_token, chance(0.15) & is_token


def started(model: LanguageModel, batch: int, seed: int = 0, time: int = 9) -> LMState:
    """The state after some tokens from a random one, so that windows hold inputs too."""
    with torch.no_grad():
        return model(random_tokens(batch, time, seed), random_state(model, batch, seed)).state


def functional(tree: PyTree, seed: int) -> Tensor:
    """A random linear functional of the real leaves of a tree."""
    weights = random_tree(tree, seed)
    pairs = zip(leaves(tree), leaves(weights), strict=True)
    terms = [(leaf * weight).sum() for (_, leaf), (_, weight) in pairs if leaf.is_floating_point()]
    return torch.stack(terms).sum()


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {
        f"parameter {name}": value
        for name, value in module.named_parameters()
        if value.requires_grad
    }


def gradients(outputs: PyTree, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a random functional of the outputs; 0 where an input is not used."""
    found = torch.autograd.grad(
        functional(outputs, seed=99), list(inputs.values()), materialize_grads=True
    )
    return {f"gradient of {name}": g for name, g in zip(inputs, found, strict=True)}


def read(
    model: LanguageModel,
    tokens: Tensor,
    state: LMState | None,
    sizes: Sequence[int],
    masks: Sequence[Tensor] = (),
) -> tuple[Tensor, LMState]:
    """The logits of tokens that are read in pieces, and the final state.

    Args:
        sizes: of the pieces.
        masks: `is_token` and `is_document_start`, or nothing.
    """
    outputs = []
    for part, *cut in zip(*(one.split(list(sizes), 1) for one in (tokens, *masks)), strict=True):
        given: dict[str, Any] = {"rows": Rows(*cut)} if cut else {}
        logits, state = model(part, state, **given)
        outputs.append(logits)
    assert state is not None
    return torch.cat(outputs, dim=1), state


def cell_leaves(model: LanguageModel, state: LMState) -> dict[str, Tensor]:
    """The state of each cell by name, with the memories of windowed heads in their place."""
    found: dict[str, Tensor] = {}
    for layer, own in enumerate(model.cell_states(state)):
        plain = own.state if isinstance(own, EditedState) else own
        found |= real_leaves(plain, f"final {layer}.")
    for layer, memory in enumerate(model.memories(state)):
        if model.cells[layer].scans:
            found[f"final {layer}.ssm"] = memory
    return found


def outcome_of(
    model: LanguageModel, logits: Tensor, start: LMState, after: LMState
) -> dict[str, Tensor]:
    """Outputs, final states and all gradients, by name."""
    final = cell_leaves(model, after)
    inputs = {**real_leaves(start, "state."), **parameters(model)}
    found = {"logits": logits, "position": after.position, **final}
    return found | gradients((logits, list(final.values())), inputs)


def in_float64(model: LanguageModel, state: LMState) -> tuple[LanguageModel, LMState]:
    """A copy of a model in float64, and of a state of it."""
    double = deepcopy(model).double()
    zero = double.init_state(len(state.position))
    return double, tree_map(lambda leaf, like: leaf.to(like.dtype), state, zero)


def outcome(
    model: LanguageModel,
    tokens: Tensor,
    state: LMState,
    sizes: Sequence[int],
    masks: Sequence[Tensor] = (),
) -> dict[str, Tensor]:
    """`outcome_of` tokens that are read in pieces."""
    start = differentiable(state)
    logits, after = read(model, tokens, start, sizes, masks)
    return outcome_of(model, logits, start, after)


def assert_same(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    dtype: torch.dtype,
    tolerance: float | None = None,
    *,
    exact: dict[str, Tensor] | None = None,
) -> None:
    """Equal tensor by tensor, to the tolerance of `dtype`.

    Given the same in float64 (`exact`), the error may be this tolerance more than twice that of
    `expected`: rounding of float32 is amplified by some weights, in every order of operations.

    In float32 the gradients of the parameters share one scale: each is a sum over all tokens, and
    where a small one (D has one entry per head) cancels, its size does not bound its rounding. So
    do those of the parts of a state, which reach it through the same layers.
    """
    assert actual.keys() == expected.keys()
    scales = dict.fromkeys(("gradient of parameter", "gradient of state"), 1e-6)
    for name, value in expected.items():
        for group in scales:
            if dtype != torch.float64 and name.startswith(group) and value.numel():
                scales[group] = max(scales[group], value.abs().max().item())
    for name in expected:
        scale = next((scales[group] for group in scales if name.startswith(group)), 1e-6)
        allowed, wanted = tolerance or TOLERANCE[dtype], expected[name]
        if exact is not None and wanted.numel():
            wanted = exact[name]
            scale = max(scale, wanted.abs().max().item())
            allowed += 2 * (expected[name] - wanted).abs().max().item() / scale
        assert_near(actual[name], wanted, allowed, name, scale)
