"""The recurrence of mamba-ssm, called as its own models call it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.ops.ssd import mamba_ssm


def peer_scan(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]] | str:
    """A function of the tensors of `ScanInputs` and the state, or the reason why there is none.

    The checks of our backend of that name are left out: the time is that of mamba-ssm alone.
    """
    if device.type != "cuda":
        return "mamba-ssm runs on a GPU only"
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
