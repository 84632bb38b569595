"""Part 4: the recurrence beside that of mamba-ssm, called as its own models call it.

mamba-ssm compiles some hundred variants of its kernels before its first result. They stay in
Triton's cache: if the budget does not suffice, `--parts mamba_ssm` a second time gets further.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.harness import Bench
from benchmarks.gpu.inputs import FAST, scan_operands
from benchmarks.gpu.kernels import recurrence_cost
from benchmarks.gpu.timing import backward_ms, forward_ms
from longrnn.errors import UserError
from longrnn.ops.ssd import BACKENDS, ScanInputs, mamba_ssm

# Largest ratios of our time to that of mamba-ssm that pass.
FORWARD, BACKWARD = 1.3, 1.6


def run(bench: Bench) -> None:
    """Forward first, because the backward pass needs more variants."""
    call = peer_scan(bench.device)
    for back, limit in ((False, FORWARD), (True, BACKWARD)):
        what = f"{FAST}, recurrence, {'backward' if back else 'forward'}, beside mamba_ssm"
        if isinstance(call, str):
            bench.skip(what, call, limit=limit, limit_of="ratio")
        else:
            work = partial(_compare, bench, call, what, limit, back=back)
            bench.attempt(what, work, seconds=5)


def _compare(
    bench: Bench,
    call: Callable[..., tuple[Tensor, Tensor]],
    what: str,
    limit: float,
    *,
    back: bool,
) -> None:
    """Times both, and checks the ratio."""
    inputs, state = scan_operands(bench)
    tensors, cost = [*inputs, state], recurrence_cost(inputs, state, back=back)

    def ours(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return BACKENDS[FAST](ScanInputs(*tensors[:-1]), tensors[-1])

    measure = backward_ms if back else forward_ms
    fast, theirs = (measure(bench, one, tensors) for one in (ours, call))
    bench.figure(f"mamba_ssm, recurrence, {'backward' if back else 'forward'}", theirs, "ms")
    bench.compare(what, fast, theirs, "mamba_ssm", cost=cost, limit=limit)


def peer_scan(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]] | str:
    """A function of the tensors of `ScanInputs` and the state, or the reason why there is none.

    The checks of our backend of that name are left out: the time is that of mamba-ssm alone.
    """
    if device.type != "cuda":
        return "mamba-ssm runs on a GPU only"
    if FAST not in BACKENDS:
        return f"the backend {FAST} cannot run here"
    try:
        scan = mamba_ssm.combined()
    except UserError as error:
        return str(error)

    def call(
        x: Tensor, gain: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        # The inputs of the benchmark have decays of this form.
        rates = (log_decay[0, 0] / gain[0, 0]).float()
        return scan(
            x, gain, rates, B, C, mamba_ssm.CHUNK, initial_states=state, return_final_states=True
        )

    return call
