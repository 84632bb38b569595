"""The gated delta rule (arXiv 2412.06464), per head with k = B_t, v = x_t, q = C_t and β = gain_t:

    h_t = h_{t−1} diag(a_t) (I − β k kᵀ) + β v kᵀ,   y_t = h_t q,   a_t = exp(log_decay_t)

The decay is one number per head, or one per key (Kimi Delta Attention, arXiv 2510.26692). Inputs
and state have the shapes of `longrnn.ops.scan`, so that h is the papers' Sᵀ. `loop` is the
definition. `delta` computes chunks in the WY form: with u_t = β (v − h_{t−1} diag(a_t) k), what a
token adds is u_t kᵀ, and the u of a chunk solve a triangular system. Given them, the recurrence is
that of `longrnn.ops.scan.definition`.

What a token reads is the state at its chunk's start minus what was erased since. In float32, tokens
after which most of that state is erased read the little that is left with an error of about 1e-7 of
the state at the chunk's start. The state after the chunk has no such error.
"""

from functools import partial

import torch
from torch import Tensor

from longrnn.ops.scan import definition as scans
from longrnn.ops.scan import limit as limits
from longrnn.ops.scan.definition import Scan, in_chunks, in_segments
from longrnn.ops.scan.inputs import ScanInputs

# Tokens per chunk: with more, solving for what they add costs more time and digits.
DELTA_CHUNK = 32

loop = partial(scans.loop, erases=True)


def delta(
    inputs: ScanInputs, state: Tensor | None = None, *, final: bool = True
) -> tuple[Tensor, Tensor]:
    """Computes the gated delta rule.

    Args:
        inputs: t >= 1; gain is β and must be 0 at padding.
        state: `(b, h, p, n)`, float32 or float64; None for zeros.
        final: whether the state after the last token is needed.

    Returns:
        y `(b, t, h, p)` and the state after the last token, both in the dtype of the state.
    """
    size = min(DELTA_CHUNK, scans.CHUNK)
    return in_segments(inputs, state, loop, partial(in_chunks, size=size, erases=True))


def limited(
    inputs: ScanInputs, state: Tensor, limit: Tensor, plain: Scan = delta
) -> tuple[Tensor, Tensor]:
    """The gated delta rule with a limit on the norm of each head's state; see `scan.limit.limited`.

    Chunks in which no norm exceeds its limit are computed by `plain`, the others token by token:
    what a token erases depends on the state, so that no scale is known in advance.
    """
    within = partial(_is_within, plain=plain)
    return limits.in_limited_segments(inputs, state, limit, plain, within, limits.token_by_token)


@torch.no_grad()
def _is_within(inputs: ScanInputs, state: Tensor, limit: Tensor, plain: Scan) -> bool:
    """Whether no state exceeds its limit; false for NaN."""
    # Each token but the first reads the state before it: h_{t−1} k_t is the output for q = k_t, and
    # h_{t−1} diag(a_t) k_t that for q = diag(a_t) k_t.
    keys, decay = inputs.B.to(state), inputs.decay.log().exp().to(state)
    if inputs.has_key_decays:
        keys = inputs.per_head(keys) * decay
        inputs, decay = inputs._replace(B=inputs.per_head(inputs.B)), 1.0
    else:
        decay = decay[..., None]
    following = torch.cat([keys[:, 1:], keys[:, :1]], dim=1)
    first = state @ inputs.per_head(keys[:, 0])[..., None]
    read, _ = plain(inputs._replace(C=following), state)
    read = torch.cat([first[..., 0][:, None], read[:, :-1]], dim=1)
    # The plain recurrence with the same states.
    adding = inputs._replace(x=inputs.x.to(state) - decay * read)
    if limits.is_within(adding, state, limit):
        return True
    if inputs.has_key_decays or inputs.x.shape[1] > scans.CHUNK:
        return False
    return bool((limits.scales_of(adding, state, limit) == 1).all())
