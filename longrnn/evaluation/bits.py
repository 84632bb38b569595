"""Bits per byte: the nats of the scored tokens over the bytes that these tokens stand for.

This is the only definition in the package. It compares models of any tokenizers, as long as they
scored the same bytes. Of several samples it is the sum of their bits over the sum of their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from longrnn.intervals import Estimate, ratio_mean


class Scored(NamedTuple):
    """`nats`: summed over scored tokens; `n_bytes`: what these tokens stand for, at least 1."""

    nats: float
    n_bytes: int

    @property
    def bits(self) -> float:
        """The nats in bits."""
        return self.nats / math.log(2)


def bits_per_byte(samples: Sequence[Scored]) -> float:
    """Σ bits / Σ bytes."""
    return sum(sample.bits for sample in samples) / sum(sample.n_bytes for sample in samples)


def estimate(samples: Sequence[Scored]) -> Estimate:
    """`bits_per_byte` with its interval over the samples (see `intervals.ratio_mean`)."""
    return ratio_mean([s.bits for s in samples], [s.n_bytes for s in samples])


def difference(samples: Sequence[Scored], others: Sequence[Scored]) -> Estimate:
    """How many bits per byte a model lies above another one on the same bytes, with its interval.

    Raises:
        ValueError: samples of different bytes.
    """
    pairs = list(zip(samples, others, strict=True))
    if any(one.n_bytes != other.n_bytes for one, other in pairs):
        raise ValueError("bits per byte are compared on the same bytes")
    return ratio_mean([a.bits - b.bits for a, b in pairs], [a.n_bytes for a, _ in pairs])
