"""The state after the same inputs have been consumed several times, in closed form.

One pass over the inputs maps a state h to a h + b, with a = exp(Σ log_decay), so k passes map it to
a^k h + b (1 − a^k) / (1 − a): any number of passes costs as much as one. With decays per key this
holds for each column of h.
"""

import torch
from torch import Tensor

# Replaces a Σ log_decay of 0, where 1 − a would be 0: (1 − a^k) / (1 − a) is then k to rounding.
LARGEST_SUM = -1e-30


def repeated(before: Tensor, after: Tensor, log_decay: Tensor, times: Tensor) -> Tensor:
    """The state after `times` passes over the same inputs.

    Args:
        before: the state before the first pass, `(b, h, p, n)`.
        after: the state after the first pass, `(b, h, p, n)`.
        log_decay: `(b, h, 1)`, or per key `(b, h, n)`, summed over the pass, at most 0.
        times: `(b,)`, at least 1; 1 gives `after` up to rounding.

    Returns:
        `(b, h, p, n)`, differentiable in all arguments except `times`.
    """
    once = log_decay.clamp(max=LARGEST_SUM)[:, :, None]  # b h 1 n
    all_times = times[:, None, None, None].to(once) * once
    passes = torch.expm1(all_times) / torch.expm1(once)
    return all_times.exp() * before + passes * (after - once.exp() * before)
