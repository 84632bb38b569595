"""The C++ kernels give the same numbers on every machine; other tests use one thread of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from longrnn.models import RecurrentLM
from longrnn.ops.cpu import library, signatures
from tests.contracts.builders import Spec, build_mitigated, random_tokens
from tests.contracts.subjects import assert_same, cell_leaves, needs_kernels, outcome, read

MAMBA2: Spec = {"kind": "mamba2", "d_state": 32, "head_dim": 16, "n_groups": 2, "backend": "cpu"}
DELTA: Spec = {"kind": "gated_deltanet", "key_dim": 32, "value_dim": 16, "backend": "cpu"}
LIMIT: Spec = {"kind": "state_norm", "threshold": 0.3}
WINDOW: Spec = {"kind": "sliding_window", "window": 70}
CASES: list[tuple[list[Spec], Spec]] = [([], MAMBA2), ([LIMIT], MAMBA2), ([WINDOW], MAMBA2)]
CASES += [([], DELTA), ([], {"kind": "lstm"}), ([LIMIT], {"kind": "gru"})]


@pytest.fixture
def anew() -> Iterator[None]:
    """The test may load other kernels and use more threads."""
    yield
    library.library.cache_clear()
    library._function.cache_clear()
    torch.set_num_threads(1)


def found(model: RecurrentLM) -> dict[str, Tensor]:
    """A long call and single tokens, with gradients and without: many rows, to be divided."""
    tokens, state = random_tokens(7, 150), model.init_state(7)
    with torch.no_grad():
        logits, after = read(model, tokens, state, [147, 1, 1, 1])
    values = {f"no_grad {name}": one for name, one in cell_leaves(model, after).items()}
    return {"no_grad": logits, **values, **outcome(model, tokens, state, [147, 3])}


@needs_kernels
@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("specs", "mixer"), CASES, ids=str)
def test_instruction_sets_and_threads(
    specs: list[Spec], mixer: Spec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine has the library of its instruction set, and divides work among its threads."""
    model = build_mitigated(specs, mixer, dtype=dtype, d_model=64)
    expected = found(model)
    for capability in library.CAPABILITIES:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        library.library.cache_clear()
        library._function.cache_clear()
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert_same(found(model), expected, dtype)


@needs_kernels
@pytest.mark.usefixtures("anew")
def test_kernels_of_other_sources_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an update of a checkout: they would read arguments of another layout."""
    library.library.cache_clear()
    monkeypatch.setattr(signatures, "digest", lambda: "0" * 16)
    assert "compile them again" in str(library.missing())
