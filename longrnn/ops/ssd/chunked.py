"""The recurrence as matrix products over chunks, in plain torch (arXiv 2405.21060, section 6).

Notable choices:
- Time is cut into segments, and segments into chunks; only one segment's intermediate values exist
  at a time, so memory is bounded by the segment. A remainder shorter than a chunk becomes a chunk
  of its own: nothing is padded.
- Decays between two tokens of a chunk are differences of one running sum, kept in float64 or as
  two float32 halves. In a single float32, one token with a strong decay would cost the slow decays
  after it their digits.
- The factor of the state, the decay of a token or of a whole chunk, is kept as 0 or 1 plus a
  remainder: a float32 near 1 that is rounded the same way every time lets a long memory drift.
- Decays below e^FLOOR are set to 0: smaller float32 numbers are denormal, which makes `exp` and the
  products up to 60 times slower on a CPU.
- NaN or infinity reaches the other tokens of its chunk and all later ones of its row, because 0
  times it is NaN. It reaches no other row.
- The backward pass of a segment is `longrnn.ops.ssd.gradient`, which keeps only the inputs and the
  first state of a segment.
- CHUNK and SEGMENT were chosen by `benchmarks/ssd_chunk_cpu.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from longrnn.ops.again import gradients_of
from longrnn.ops.linear import batched_nt
from longrnn.ops.precision import own_precision
from longrnn.ops.ssd.base import ScanInputs
from longrnn.ops.ssd.decays import (
    decay_between,
    exp_in_place,
    running_sums,
    split_decay,
)
from longrnn.ops.ssd.gradient import segment_gradient
from longrnn.ops.transforms import in_forward_mode

CHUNK = 64
SEGMENT = 512
# On other devices than a CPU, where a segment costs some hundred launches.
DEVICE_SEGMENT = 8192
# A remainder of at most this many tokens is processed sequentially, which is faster than a chunk.
MAX_SEQUENTIAL = 2


def ssd(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.ssd.base.SSD`."""
    with own_precision(state):
        return _chunkwise(inputs, state)


def _chunkwise(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    time = inputs.x.shape[1]
    if time == 1:
        return _token(inputs, state)
    outputs = []
    longest = SEGMENT if state.device.type == "cpu" else DEVICE_SEGMENT
    for start, stop, chunk in _segments(time, longest):
        segment = inputs.slice(start, stop)
        y, state = _segment(segment, state, chunk) if stop - start > 1 else _token(segment, state)
        outputs.append(y)
    return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]), state


def _segments(time: int, longest: int) -> list[tuple[int, int, int]]:
    """(start, stop, chunk) of the segments of `time` tokens; each is a multiple of its chunk."""
    whole = time - time % CHUNK
    segments = [(s, min(s + longest, whole), CHUNK) for s in range(0, whole, longest)]
    if time - whole > MAX_SEQUENTIAL:
        return [*segments, (whole, time, time - whole)]
    return segments + [(token, token + 1, 1) for token in range(whole, time)]


def _token(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence for one token."""
    b, _, h, p = inputs.x.shape
    g, n = inputs.B.shape[2:]
    u = inputs.scaled_x(state.dtype).reshape(b, g, h // g * p, 1)
    B = inputs.B.to(state.dtype).reshape(b, g, 1, n)
    whole, rest = split_decay(inputs.log_decay.reshape(b, h, 1, 1), state.dtype)
    added = (rest * state).reshape(b, g, -1, n).addcmul_(u, B)
    state = torch.addcmul(added.view(b, h, p, n), whole, state)
    C = inputs.C.to(state.dtype).reshape(b, g, n, 1)
    return (state.reshape(b, g, -1, n) @ C).view(b, 1, h, p), state


def _segment(inputs: ScanInputs, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """`_scan`, with a backward pass that computes intermediate values again."""
    if not torch.is_grad_enabled() or in_forward_mode():
        return _scan(inputs, state, chunk)
    return _Scan.apply(*inputs, state, chunk)


class _Scan(torch.autograd.Function):
    """`_scan` with `segment_gradient` as its backward pass."""

    @staticmethod
    def forward(
        x: Tensor,
        gain: Tensor,
        log_decay: Tensor,
        B: Tensor,
        C: Tensor,
        state: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        return _scan(ScanInputs(x, gain, log_decay, B, C), state, chunk)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.chunk = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        if grad_y is None and grad_final is None:
            return (None,) * 7
        with own_precision(tensors[-1]):
            if not torch.is_grad_enabled():
                inputs, state = ScanInputs(*tensors[:5]), tensors[5]
                wants_state = ctx.needs_input_grad[5]
                gradients = segment_gradient(
                    inputs, state, grad_y, grad_final, ctx.chunk, wants_state=wants_state
                )
                return *gradients, None

            def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
                return _scan(ScanInputs(*tensors[:5]), tensors[5], ctx.chunk)

            wants = ctx.needs_input_grad[:6]
            return *gradients_of(run, tensors, wants, (grad_y, grad_final)), None


def _scan(inputs: ScanInputs, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The recurrence for one segment of whole chunks."""
    b, time, h, p = inputs.x.shape
    g, n = inputs.B.shape[2:]
    m, r, dtype = time // chunk, h // g, state.dtype
    u = inputs.scaled_x(dtype).unflatten(1, (m, chunk))
    B = rearrange(inputs.B.to(dtype), "b (m j) g n -> b m g j n", m=m)
    C = rearrange(inputs.C.to(dtype), "b (m i) g n -> b m g i n", m=m)
    total = running_sums(inputs.log_decay, m)

    # Within a chunk: attention-like products with the decay between j and i.
    scores = (C @ B.transpose(3, 4)).tril()  # b m g i j
    weights = scores[:, :, :, None] * decay_between(total, dtype).unflatten(2, (g, r))
    y = weights.flatten(2, 3) @ u.transpose(2, 3)  # b m h i p

    # Across chunks: the contribution of the state at a chunk's start, then the next state.
    # `unbind`, because the gradient of each of m selections would be a whole tensor of zeros.
    to_end = exp_in_place((total[:, :, -1:] - total).to(dtype))  # b m j h
    u_to_end = rearrange(u * to_end[..., None], "b m j (g r) p -> b m g (r p) j", g=g)
    # Decay of a whole chunk, b m g (r p) 1: one number per row of the state. The state is reshaped
    # to rows too, so that no in-place change goes through a view, which autograd would copy.
    whole, rest = (
        part.expand(b, m, h, p).reshape(b, m, g, r * p, 1)
        for part in split_decay(total[:, :, -1, :, None], dtype)
    )
    rows = state.reshape(b * g, r * p, n)
    carried = []
    for u_m, B_m, C_m, whole_m, rest_m in zip(
        *(tensor.unbind(1) for tensor in (u_to_end, B, C, whole, rest)), strict=True
    ):
        carried.append(batched_nt(C_m.flatten(0, 1), rows).view(b, g, chunk, r * p))
        added = rest_m.reshape(b * g, r * p, 1) * rows
        added = added.baddbmm_(u_m.flatten(0, 1), B_m.flatten(0, 1))
        rows = torch.addcmul(added, whole_m.reshape(b * g, r * p, 1), rows)
    state = rows.view(b, h, p, n)

    since_start = exp_in_place(total.to(dtype, copy=True))[..., None]  # b m i h 1
    start = torch.stack(carried, dim=1).transpose(2, 3).reshape(b, m, chunk, h, p)
    # Not addcmul: its result would have the memory layout of `y` and be copied once more.
    return (start * since_start).add_(y.transpose(2, 3)).reshape(b, time, h, p), state
