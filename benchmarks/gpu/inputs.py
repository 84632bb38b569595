"""Random inputs of the recurrence with the shapes and the strides of a Mamba-2."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.gpu.harness import Bench
from benchmarks.gpu.record import FAILED
from benchmarks.gpu.sizes import Sizes
from longrnn.ops import triton
from longrnn.ops.ssd import BACKENDS, ScanInputs

# Range of dt and of −A in a new Mamba-2.
DT, RATES = (1e-3, 1e-1), (1.0, 16.0)
# Norm of a state that these inputs reach.
LIMIT = 4.0
# The loop over tokens, and the C++ kernels, which hand tensors of a GPU to `chunked`.
NOT_TIMED = ("reference", "native")
# The backend that the limits of times are for.
FAST = "triton"


def backends(bench: Bench) -> list[str]:
    """The backends that compute on this device in their own way, without the reference.

    On a GPU a row says if FAST is not among them: nothing else would show that it was not checked.
    """
    on_gpu = bench.device.type == "cuda"
    if on_gpu and FAST not in BACKENDS:
        bench.add(f"backend {FAST}", FAILED, reason=triton.missing() or "")
    left_out = NOT_TIMED if on_gpu else NOT_TIMED[:1]
    return [name for name in BACKENDS if name not in left_out]


def scan_operands(bench: Bench) -> tuple[ScanInputs, Tensor]:
    """Inputs of the timed recurrence in bfloat16, and its initial state."""
    sizes = bench.sizes
    return scan_inputs(sizes, projected(sizes, sizes.tokens, bench.device, torch.bfloat16))


def projected(sizes: Sizes, tokens: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`(1, tokens, …)`: random numbers where a Mamba-2 has the result of its first projection."""
    width = sizes.d_inner + sizes.d_conv_input + sizes.heads
    empty = torch.empty(1, tokens, width, device=device, dtype=dtype)
    return empty.normal_(generator=randomness(device, tokens))


def scan_inputs(
    sizes: Sizes, wide: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[ScanInputs, Tensor]:
    """Inputs of the recurrence as views of `projected`, and a random state.

    Args:
        sizes: of the run.
        wide: see `projected`.
        dtype: of steps, decays and state.
    """
    device, tokens = wide.device, wide.shape[1]
    _, xBC, _ = wide.split([sizes.d_inner, sizes.d_conv_input, sizes.heads], dim=-1)
    x, B, C = xBC.split([sizes.d_inner, sizes.d_state, sizes.d_state], dim=-1)
    x = x.unflatten(-1, (sizes.heads, sizes.head_dim))
    draw = randomness(device, 1)
    low, high = (math.log(end) for end in DT)
    dt = torch.empty(1, tokens, sizes.heads, device=device, dtype=dtype)
    dt = dt.uniform_(low, high, generator=draw).exp_()
    A = torch.empty(sizes.heads, device=device, dtype=dtype).uniform_(*RATES, generator=draw).neg_()
    state = torch.empty(1, sizes.heads, sizes.head_dim, sizes.d_state, device=device, dtype=dtype)
    inputs = ScanInputs(x, dt, dt * A, B[:, :, None], C[:, :, None])
    return inputs, state.normal_(generator=draw)


def randomness(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
