"""The tests for a GPU on a simulated one: they hold before anyone runs them on a real one.

Tensors on the wrong device, host reads inside a CUDA graph, and the paths that only a GPU takes are
found here; see `tests.simulated_cuda`. With torch's operators by default, and with the kernels
under Triton's interpreter as slow tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cuda import test_contract, test_fused, test_precision, test_work
from tests.mixers import test_modes
from tests.models import test_decoding, test_decoding_windows
from tests.simulated_cuda import simulated

pytestmark = [
    pytest.mark.usefixtures("simulated_gpu"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU"),
]
# Prefill in two calls, and single tokens; the kernels take much longer in the interpreter.
SPLIT = [21, 6, 1, 1]
ELSEWHERE = (
    test_modes.test_both_modes_give_the_same_values_and_gradients,
    test_decoding.test_a_graph_gives_the_bits_of_calls,
    test_decoding_windows.test_a_graph_under_a_window_gives_what_calls_give,
    test_decoding.test_a_model_on_another_gpu_than_the_current_one_generates_the_same_tokens,
)
# What the simulation leaves out: parts of names.
REASONS = {
    "bfloat16": "the tolerance is that of longer texts",
    "test_backends_of_other_packages": "mamba-ssm needs a real GPU",
    "test_batches_for_a_gpu_are_page_locked": "memory is that of the CPU",
}

for module in (test_contract, test_fused, test_precision, test_work):
    globals().update({name: one for name, one in vars(module).items() if name.startswith("test_")})
globals().update({test.__name__: test for test in ELSEWHERE})


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture
def default_device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture(params=["torch", pytest.param("kernels", marks=pytest.mark.slow)])
def simulated_gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A simulated device, with and without Triton."""
    fused, name = request.param == "kernels", request.node.name
    of_kernels = hasattr(test_fused, request.node.originalname)
    if fused and not of_kernels and "mamba2" not in name:
        pytest.skip("only Mamba-2 has kernels")
    if not fused and (of_kernels or "triton" in name):
        pytest.skip("where Triton is missing")
    for part, reason in REASONS.items():
        if part in name:
            pytest.skip(reason)
    monkeypatch.setattr(test_contract, "SPLIT", SPLIT)
    with simulated(fused=fused):
        yield
