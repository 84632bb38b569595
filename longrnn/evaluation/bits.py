"""Bits per byte: the loss of the scored tokens over the bytes of these tokens.

This is the only definition in the package. It compares models with any tokenizers, as long as they
scored the same bytes. For several samples it is the sum of their bits over the sum of their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from longrnn.intervals import Estimate, ratio_mean


class Scored(NamedTuple):
    """`nats`: sum over scored tokens; `n_bytes`: number of bytes of these tokens, at least 1."""

    nats: float
    n_bytes: int

    @property
    def bits(self) -> float:
        """The loss in bits."""
        return self.nats / math.log(2)


def bits_per_byte(samples: Sequence[Scored]) -> float:
    """Return Σ bits / Σ bytes."""
    return sum(sample.bits for sample in samples) / sum(sample.n_bytes for sample in samples)


def estimate(samples: Sequence[Scored]) -> Estimate:
    """Return `bits_per_byte` with its interval over samples (see `intervals.ratio_mean`)."""
    return ratio_mean([s.bits for s in samples], [s.n_bytes for s in samples])


def difference(samples: Sequence[Scored], others: Sequence[Scored]) -> Estimate:
    """Return the bits per byte of a model minus those of another on the same bytes.

    Raises:
        ValueError: samples with different numbers of bytes.
    """
    pairs = list(zip(samples, others, strict=True))
    if any(one.n_bytes != other.n_bytes for one, other in pairs):
        raise ValueError("bits per byte are compared on the same bytes")
    return ratio_mean([a.bits - b.bits for a, b in pairs], [a.n_bytes for a, _ in pairs])
