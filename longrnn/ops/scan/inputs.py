"""The inputs of a recurrence, and how its decays are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.ops.transforms import is_transformed


class Decay(NamedTuple):
    """How the decays are made, per head or per key: log a = step · rate + log keep.

    Decays per key of many tokens need not exist in memory: a kernel reads the three.

    Attributes:
        step: `(b, t, h)` or, per key, `(b, t, h, n)`, at least 0, and infinite where a document
            begins. Without a rate it is the log decay itself, at most 0 and −∞ at such a token.
        rate: `(h,)`, `(b, t, h)` or, per key, `(h, n)`, below 0; None for a cell that has no step.
        keep: `(h,)` or `(b, t, h)` float64, in (0, 1], a factor of all decays; None for 1.
    """

    step: Tensor
    rate: Tensor | None = None
    keep: Tensor | None = None

    @property
    def is_per_key(self) -> bool:
        """Whether each key of a head has a decay of its own."""
        return self.step.ndim == 4 or (self.rate is not None and self.rate.ndim == 2)

    def log(self) -> Tensor:
        """The log decays, `(b, t, h)` or, per key, `(b, t, h, n)`."""
        log = self.step
        if self.rate is not None:
            step, rate = self.step, self.rate
            if self.is_per_key:
                step = step if step.ndim == 4 else step[..., None]
                rate = rate if rate.ndim == 2 else rate[..., None]
            is_tracked = torch.is_grad_enabled() and (step.requires_grad or rate.requires_grad)
            if is_tracked or is_transformed():
                is_start = step == math.inf  # ∞ times the gradient, which is 0, would be NaN
                log = (step.masked_fill(is_start, 0) * rate).masked_fill(is_start, -math.inf)
            else:
                # Below 0, also where A is so small that it is rounded to 0: ∞ times 0 is NaN.
                log = step * rate.clamp(max=-torch.finfo(rate.dtype).tiny)
        if self.keep is None:
            return log
        log_keep = self.keep.log().to(log)
        return log + (log_keep[..., None] if log.ndim == 4 else log_keep)

    def total(self) -> Tensor:
        """The sum of the log decays of all tokens, `(b, h, 1)` or `(b, h, n)` in float64."""
        step, rate = self.step.double(), self.rate
        step = step if step.ndim == 4 else step[..., None]
        if rate is not None and rate.ndim == 3:
            step, rate = step * rate[..., None], None
        total = step.sum(1)
        if rate is not None:
            total = total * (rate if rate.ndim == 2 else rate[:, None])
        if self.keep is None:
            return total
        return total + self.keep.log().expand(self.step.shape[:3]).sum(1)[..., None]


class ScanInputs(NamedTuple):
    """Inputs of the recurrence.

    Attributes:
        x: `(b, t, h, p)`.
        gain: `(b, t, h)`, in float32 or float64; for Mamba-2 it is dt.
        decay: per head or per key; for Mamba-2 its step is dt, and its rate A.
        B: `(b, t, g, n)`; head i reads group i // (h / g).
        C: `(b, t, g, n)`.
    """

    x: Tensor
    gain: Tensor
    decay: Decay
    B: Tensor
    C: Tensor

    @property
    def has_key_decays(self) -> bool:
        """Whether each key of a head has a decay of its own."""
        return self.decay.is_per_key

    def log_decay(self) -> Tensor:
        """The log decays, `(b, t, h, k)`, where k is 1, or n with decays per key."""
        log = self.decay.log()
        return log if log.ndim == 4 else log[..., None]

    def tensors(self) -> list[Tensor | None]:
        """All tensors: x, gain, the three of the decay, B, C."""
        return [self.x, self.gain, *self.decay, self.B, self.C]

    @classmethod
    def of(cls, tensors: Iterable[Any]) -> ScanInputs:
        """The inputs from `tensors`."""
        x, gain, step, rate, keep, B, C = tensors
        return cls(x, gain, Decay(step, rate, keep), B, C)

    def each(self, change: Callable[[Tensor], Tensor]) -> ScanInputs:
        """The same change of all tensors that have an axis of time."""
        return self.of(
            change(one) if one is not None and one.ndim >= 3 else one for one in self.tensors()
        )

    def expanded(self) -> ScanInputs:
        """The inputs with the log decays of all tokens."""
        return self._replace(decay=Decay(self.decay.log()))

    def slice(self, start: int, stop: int) -> ScanInputs:
        """The inputs of tokens `start` up to `stop`."""
        return self.each(lambda tensor: tensor[:, start:stop])

    def split(self, length: int) -> list[ScanInputs]:
        """The inputs of parts of at most `length` tokens.

        The gradient of a slice would be a tensor as long as the whole call.
        """
        parts = (
            one.split(length, 1) if one is not None and one.ndim >= 3 else repeat(one)
            for one in self.tensors()
        )
        return [self.of(part) for part in zip(*parts, strict=False)]

    def heads(self, index: Tensor) -> ScanInputs:
        """The inputs of some heads; with several groups, each head gets its own B and C.

        Args:
            index: `(k,)` int64.
        """
        x, gain = self.x.index_select(2, index), self.gain.index_select(2, index)
        chosen = (
            None if one is None else one.index_select(2 if one.ndim >= 3 else 0, index)
            for one in self.decay
        )
        B, C = self.B, self.C
        if B.shape[2] > 1:
            group = index // (self.x.shape[2] // B.shape[2])
            B, C = B.index_select(2, group), C.index_select(2, group)
        return self.of([x, gain, *chosen, B, C])

    def per_head(self, shared: Tensor) -> Tensor:
        """B or C of every head, `(…, h, n)`, from those of the groups `(…, g, n)`."""
        return shared.repeat_interleave(self.x.shape[2] // shared.shape[-2], -2)

    def to(self, dtype: torch.dtype) -> ScanInputs:
        """The inputs in one dtype."""
        keep = self.decay.keep
        given = self.of(None if one is None else one.to(dtype) for one in self.tensors())
        return given._replace(decay=given.decay._replace(keep=keep))

    def zero_state(self) -> Tensor:
        """The state before the first token, `(b, h, p, n)` in the dtype of the decays."""
        b, _, h, p = self.x.shape
        return self.decay.step.new_zeros(b, h, p, self.B.shape[3])
