"""Initialisations of the recurrence: what a cell's `init` option names.

A cell draws its weights first, as it always has, and an initialisation then writes over some of
them: `default` changes nothing, not even the random numbers that are drawn later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn

import torch
from torch import Tensor, nn

from longrnn.errors import UserError
from longrnn.mixers.base import Mixer, StepwiseMixer
from longrnn.registry import Registry

# Tokens: `long_memory` draws time scales uniformly between 2 and this.
LONGEST = 1024


class Init(ABC):
    """Writes over weights of a cell that has just been built."""

    @abstractmethod
    def apply(self, mixer: Mixer) -> None:
        """Changes the cell in place.

        Raises:
            UserError: not defined for this kind of cell.
        """


INITS: Registry[Init] = Registry("init")


@INITS.register("default")
class Default(Init):
    """Nothing: torch.nn's uniform draw, or the published one of Mamba-2."""

    def apply(self, mixer: Mixer) -> None:
        return


@INITS.register("orthogonal")
class Orthogonal(Init):
    """Each gate's recurrent matrix orthogonal: all eigenvalues of norm 1 (arXiv 1312.6120)."""

    def apply(self, mixer: Mixer) -> None:
        _, weight_hh, _, _ = _weights(mixer, "orthogonal")
        for block in weight_hh.split(mixer.d_model):
            nn.init.orthogonal_(block)


@INITS.register("identity")
class Identity(Init):
    """The recurrent matrix 1 and no bias: a state that is kept as it is (arXiv 1504.00941)."""

    def apply(self, mixer: Mixer) -> None:
        _, weight_hh, *biases = _weights(mixer, "identity")
        if isinstance(mixer, StepwiseMixer) and mixer.gated:
            _refuse("identity", mixer, "its gates decide what is kept; use long_memory")
        nn.init.eye_(weight_hh)
        for bias in biases:
            nn.init.zeros_(bias)


@INITS.register("xavier")
class Xavier(Init):
    """Each gate's two matrices uniform as of Glorot and Bengio (2010), and no bias."""

    def apply(self, mixer: Mixer) -> None:
        weight_ih, weight_hh, *biases = _weights(mixer, "xavier")
        for block in (*weight_ih.split(mixer.d_model), *weight_hh.split(mixer.d_model)):
            nn.init.xavier_uniform_(block)
        for bias in biases:
            nn.init.zeros_(bias)


@INITS.register("long_memory")
class LongMemory(Init):
    """Time scales uniform between 2 and LONGEST tokens, one a unit or head (arXiv 1804.11188).

    The cell's own `hold` turns time scales into biases; for an LSTM and a GRU that is the chrono
    initialisation of the paper.
    """

    def apply(self, mixer: Mixer) -> None:
        count = mixer.d_model if isinstance(mixer, StepwiseMixer) else mixer.n_heads
        if not mixer.init_time_scales(torch.empty(count).uniform_(2, LONGEST)):
            _refuse("long_memory", mixer, "it has no gate that could hold; use identity")


def initialise(mixer: Mixer, init: str) -> None:
    """Applies the initialisation called `init`; the last line of a cell's constructor.

    Raises:
        UserError: an unknown one, or one that is not defined for the cell.
    """
    INITS[init]().apply(mixer)


def _weights(mixer: Mixer, init: str) -> list[Tensor]:
    """`weight_ih`, `weight_hh`, `bias_ih` and `bias_hh` of a cell with recurrent matrices."""
    if not isinstance(mixer, StepwiseMixer):
        _refuse(init, mixer, "its state has no recurrent matrix, only decays; use long_memory")
    return [weight.detach() for weight in mixer.cell.all_weights[0]]


def _refuse(init: str, mixer: Mixer, reason: str) -> NoReturn:
    kind = type(mixer).__name__.lower()
    raise UserError(f"init {init!r} is not defined for {kind}: {reason}")
