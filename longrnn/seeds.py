"""Generators of random numbers from the seeds that users give."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from longrnn.errors import UserError

if TYPE_CHECKING:
    import torch


def seeded(seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A new generator with a seed.

    Raises:
        UserError: a seed that does not fit into 64 bits.
    """
    import torch

    if not -(2**63) <= seed < 2**64:
        raise UserError("a seed must be from -2**63 to 2**64 - 1: give such a number")
    return torch.Generator(device).manual_seed(seed)


def mix(*parts: int | str) -> int:
    """One 63-bit seed from several numbers and names."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
