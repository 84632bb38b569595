"""The tests of `test_contract` on a simulated GPU: they hold before anyone runs them on a real one.

Tensors on the wrong device, host reads inside a CUDA graph, and the paths that only a GPU takes are
found here; see `tests.simulated_cuda`. With torch's operators by default, and with the kernels
under Triton's interpreter as slow tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda import test_contract
from tests.cuda.test_contract import (  # noqa: F401
    test_a_generated_token_does_not_wait_for_the_gpu,
    test_a_padded_and_packed_batch,
    test_a_training_step_under_autocast,
    test_backends_in_a_model,
    test_cells,
    test_generation_and_evaluation,
    test_jacobians,
    test_mitigations,
    test_positions,
    test_recomputation_gives_the_same_bits,
    test_states_are_values,
)
from tests.mixers.test_modes import test_both_modes_give_the_same_values_and_gradients  # noqa: F401
from tests.models.test_decoding import test_a_graph_gives_the_bits_of_calls  # noqa: F401
from tests.simulated_cuda import simulated

# Prefill in two calls, and single tokens; the kernels take much longer in the interpreter.
SPLIT = [21, 6, 1, 1]


@pytest.fixture(autouse=True, params=["torch", pytest.param("kernels", marks=pytest.mark.slow)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A simulated device, with and without Triton."""
    fused, name = request.param == "kernels", request.node.nodeid
    if fused and "mamba2" not in name:
        pytest.skip("only Mamba-2 has kernels")
    if not fused and "triton" in name:
        pytest.skip("where Triton is missing")
    if "test_cells" in name and "bfloat16" in name:
        pytest.skip("the tolerance is that of longer texts")
    monkeypatch.setattr(test_contract, "SPLIT", SPLIT)
    with simulated(fused=fused):
        yield
