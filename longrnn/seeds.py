"""Generators of random numbers from the seeds that users give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longrnn.errors import UserError

if TYPE_CHECKING:
    import torch

# What torch takes.
SMALLEST, LARGEST = -(2**63), 2**64 - 1


def check_seed(seed: int) -> None:
    """Refuses a seed that does not fit into 64 bits.

    Raises:
        UserError: such a seed.
    """
    if not SMALLEST <= seed <= LARGEST:
        shown = str(seed) if abs(seed) < 10**30 else "a number of more than 30 digits"
        raise UserError(f"the seed must fit into 64 bits: give one from 0 to 2^64 - 1, not {shown}")


def seeded(seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A new generator with a seed.

    Raises:
        UserError: a seed that does not fit into 64 bits.
    """
    import torch

    check_seed(seed)
    return torch.Generator(device).manual_seed(seed)
