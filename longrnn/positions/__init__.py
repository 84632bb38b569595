"""Positional encodings of the absolute positions that the state counts."""

from longrnn.positions.base import POSITIONS, PositionalEncoding
from longrnn.positions.duplicate import Duplicate
from longrnn.positions.learned import Learned
from longrnn.positions.none import NoEncoding
from longrnn.positions.random import Random
from longrnn.positions.sinusoidal import Sinusoidal

__all__ = [
    "POSITIONS",
    "Duplicate",
    "Learned",
    "NoEncoding",
    "PositionalEncoding",
    "Random",
    "Sinusoidal",
]
