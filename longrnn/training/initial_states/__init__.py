"""The states from which training rows start: one policy per registered name."""

from longrnn.training.initial_states.base import (
    INITIAL_STATES,
    Context,
    InitialState,
)
from longrnn.training.initial_states.carried import Carry, Pass
from longrnn.training.initial_states.noise import FittedNoise, RandomNoise

__all__ = [
    "INITIAL_STATES",
    "Carry",
    "Context",
    "FittedNoise",
    "InitialState",
    "Pass",
    "RandomNoise",
]
