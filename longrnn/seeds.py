"""Generators of random numbers from the seeds that users give."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seeded(seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A new generator with a seed."""
    import torch

    return torch.Generator(device).manual_seed(seed)


def mix(*parts: int | str) -> int:
    """One 63-bit seed from several numbers and names."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
