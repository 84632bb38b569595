"""Small models of every kind, and the comparisons that tests share.

The contract tests run over the registries: a new entry is tested once it is registered. Only an
entry whose defaults do not suit a small model needs a line in the tables below.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from longrnn.cells import MIXERS, Cell
from longrnn.mitigations import MITIGATIONS, mitigation
from longrnn.models import LanguageModel, LMOutput, RecurrentConfig, RecurrentLM, Rows
from longrnn.state import LMState, PyTree, leaves, tree_map

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Spec = dict[str, Any]

# In place of a GPU: no operation that reads a value back from the device runs on it.
GPU = torch.device("meta")
VOCAB = 11
D_MODEL = 8
LONGEST = 300

MIXER_OPTIONS: dict[str, Spec] = {
    "mamba": {"d_state": 5, "dt_rank": 3},
    "mamba2": {"d_state": 6, "head_dim": 4, "n_groups": 2},
    "mamba3": {"d_state": 6, "head_dim": 4, "n_groups": 2},
    "gated_deltanet": {"n_key_heads": 2, "key_dim": 8, "value_dim": 4},
    "kda": {"key_dim": 8, "value_dim": 8},
}
POSITION_OPTIONS: dict[str, Spec] = {
    "learned": {"max_length": 2 * LONGEST},
    "random": {"max_length": 2 * LONGEST},
}
# Options that have a clear effect on a small model.
MITIGATION_OPTIONS: dict[str, Spec] = {
    "forget_more": {"decay_scale": 0.9, "input_scale": 0.75},
    "power_decay": {"scale": 1.3},
    "scale_decay": {"scale": 1.5},
    "scale_delta": {"scale": 0.7},
    "sliding_window": {"window": 7, "heads": [0]},
    "state_norm": {"threshold": 0.015},
    "time_scales": {"bias": -0.4, "heads": [0]},
    "token_filter": {"threshold": 0.05},
}
# Options that run code of their own.
MORE_MIXERS: list[Spec] = [
    {"kind": "rnn", "nonlinearity": "relu"},
    {"kind": "rnn", "nonlinearity": "identity"},
    {"kind": "mamba2", "d_state": 5, "head_dim": 8, "backend": "torch", "d_conv": 1},
    {"kind": "mamba2", "d_state": 5, "head_dim": 16, "bias": True, "conv_bias": False, "d_conv": 2},
    {"kind": "mamba2", "d_state": 3, "head_dim": 2, "n_groups": 4, "dt_limit": [0.01, 0.05]},
    {"kind": "mamba3", "d_state": 5, "head_dim": 8, "rope_fraction": 1.0, "backend": "torch"},
    {"kind": "mamba", "d_state": 3, "d_conv": 1, "select_norm_eps": 1e-3, "backend": "torch"},
    {"kind": "mamba", "d_state": 9, "expand": 1, "bias": True, "conv_bias": False, "d_conv": 2},
    {"kind": "gated_deltanet", "n_heads": 2, "key_dim": 7, "value_dim": 5, "d_conv": 1}
    | {"negative_eigenvalues": True, "backend": "torch"},
    {"kind": "kda", "n_heads": 2, "n_key_heads": 1, "key_dim": 5, "value_dim": 3}
    | {"rank": 2, "d_conv": 1},
]

BLOCK_KINDS = ["plain", "residual"]
# Relative to the largest entry of the tensor compared.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = list(TOLERANCE)


def mixer_spec(kind: str) -> Spec:
    return {"kind": kind, **MIXER_OPTIONS.get(kind, {})}


def position_spec(kind: str) -> Spec:
    return {"kind": kind, **POSITION_OPTIONS.get(kind, {})}


def mitigation_spec(kind: str) -> Spec:
    return {"kind": kind, **MITIGATION_OPTIONS.get(kind, {})}


def spec_id(spec: object) -> str:
    """The id of a parametrised test: `mamba2-d_conv=1`; a dtype prints as itself."""
    if not isinstance(spec, dict):
        return str(spec).removeprefix("torch.")
    options = [f"{name}={value}" for name, value in spec.items() if name != "kind"]
    return "-".join([spec["kind"], *options]).replace(" ", "")


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
# A scan, a delta rule with decays per key, and a stepwise cell: their base classes apply an edit.
KINDS_OF_CELLS = ("mamba2", "kda", "lstm")
DEFINED_FEW = [pair for pair in DEFINED if pair[1]["kind"] in KINDS_OF_CELLS]
MIXER_SPECS = [mixer_spec(kind) for kind in MIXERS] + MORE_MIXERS


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


def build_mixer(spec: Spec, dtype: torch.dtype = torch.float64, seed: int = 0) -> Cell:
    """A cell with input width D_MODEL + 2 and output width D_MODEL."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        mixer = MIXERS.build(spec, D_MODEL + 2, D_MODEL)
    return stirred(mixer.to(dtype), seed)


def build_model(
    mixer: str | Spec = "mamba2",
    position: str = "none",
    block: str = "residual",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **config: Any,
) -> RecurrentLM:
    spec = mixer_spec(mixer) if isinstance(mixer, str) else mixer
    settings: Spec = {"vocab_size": VOCAB, "d_model": D_MODEL, "n_layers": 2, "block": block}
    settings |= {"mixer": spec, "position": position_spec(position), **config}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = RecurrentLM(RecurrentConfig(**settings))
    return stirred(model.to(dtype), seed)


def build_mitigated(
    specs: Sequence[Spec], mixer: str | Spec = "mamba2", **model: Any
) -> RecurrentLM:
    """`build_model` under mitigations."""
    plain = build_model(mixer, **model)
    return plain.under([mitigation(spec) for spec in specs]) if specs else plain


class Scripted(LanguageModel):
    """A model without cells, whose logits are a function of how many tokens it has read."""

    def __init__(self, vocab_size: int, logits: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.vocab_size, self.logits = vocab_size, logits

    def weights_fingerprint(self, *, rounded: bool = False) -> str:
        return "scripted"

    def zero_state(self, batch_size: int) -> LMState:
        return LMState(torch.zeros(batch_size, dtype=torch.long), ())

    def forward(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        rows: Rows | None = None,
    ) -> LMOutput:
        state = self.init_state(len(tokens)) if state is None else state
        read = state.position[:, None] + torch.arange(1, tokens.shape[1] + 1)
        keep = tokens.shape[1] if keep is None else keep
        logits = self.logits(read[..., None]).expand(*read.shape, self.vocab_size)
        return LMOutput(logits[:, read.shape[1] - keep :], LMState(read[:, -1], ()))


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


def random_state(model: LanguageModel, batch: int, seed: int = 0) -> LMState:
    """A state with random memories and positions, and no inputs in its windows."""
    return random_tree(model.init_state(batch), seed)


def differentiable(tree: PyTree) -> PyTree:
    """A copy whose real leaves collect gradients."""
    return tree_map(
        lambda leaf: leaf.clone().requires_grad_() if leaf.is_floating_point() else leaf, tree
    )


def real_leaves(tree: PyTree, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": leaf for name, leaf in leaves(tree) if leaf.is_floating_point()}


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


def assert_trees_near(actual: PyTree, expected: PyTree, tolerance: float) -> None:
    """`assert_near` of all leaves."""
    for (name, ours), (_, theirs) in zip(leaves(actual), leaves(expected), strict=True):
        assert_near(ours, theirs, tolerance, name)


def assert_trees_equal(actual: PyTree, expected: PyTree) -> None:
    """Bit for bit, NaN equal to NaN."""
    ours, theirs = dict(leaves(actual)), dict(leaves(expected))
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        assert leaf.dtype == theirs[name].dtype, name
        torch.testing.assert_close(
            leaf, theirs[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def random_sizes(time: int, seed: int, *, empty: bool = False) -> list[int]:
    """Sizes of the pieces of `time` tokens: cuts anywhere, and a run of single tokens."""
    randomness = generator(seed)
    cuts = torch.randint(0, time + 1, (5,), generator=randomness).tolist()
    first = cuts.pop()
    bounds = sorted([0, *cuts, *range(first, min(first + 3, time)), time])
    sizes = [stop - start for start, stop in pairwise(bounds)]
    return sizes if empty else [size for size in sizes if size]
