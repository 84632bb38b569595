"""Generators of random numbers from the seeds that users give."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from longrnn.errors import UserError

if TYPE_CHECKING:
    import torch

# What torch takes.
SMALLEST, LARGEST = -(2**63), 2**64 - 1


def check_seed(seed: int) -> int:
    """`seed`, where every generator of random numbers takes it.

    Raises:
        UserError: it is not a whole number of 64 bits.
    """
    whole = isinstance(seed, int) and not isinstance(seed, bool)
    if not (whole and SMALLEST <= seed <= LARGEST):
        shown = "a number of more than 30 digits" if whole and abs(seed) > 10**30 else repr(seed)
        raise UserError(
            f"{shown} is not a valid seed: give a whole number from -2**63 to 2**64 - 1"
        )
    return seed


def seeded(seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A new generator with a seed.

    Raises:
        UserError: a seed that does not fit into 64 bits.
    """
    import torch

    return torch.Generator(device).manual_seed(check_seed(seed))


def mix(*parts: int | str) -> int:
    """One 63-bit seed from several numbers and names."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
