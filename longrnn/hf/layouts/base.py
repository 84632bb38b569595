"""The contract of a layout, and what its members share.

Every layout holds the model that `RecurrentLM` computes with `mamba2` cells, under other names.
What one of them can say and `RecurrentLM` cannot compute is refused, never approximated.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.mixers.mamba2 import Mamba2
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.registry import Registry, keyword_options

# Beginnings of the names of weights, ours and those of mamba-ssm.
NAMES = {
    "embedding.": "backbone.embedding.",
    "blocks.": "backbone.layers.",
    "norm.": "backbone.norm_f.",
    "head.": "lm_head.",
}


class Layout(ABC):
    """How a family of checkpoints writes a Mamba-2 model down.

    Attributes:
        names: beginnings of the names of weights, ours and theirs.
    """

    names: ClassVar[Mapping[str, str]]

    @staticmethod
    @abstractmethod
    def is_described(config: Mapping[str, Any]) -> bool:
        """Whether a `config.json` is of this layout."""

    @staticmethod
    @abstractmethod
    def read(config: Mapping[str, Any], source: str) -> RecurrentConfig:
        """Our configuration.

        Args:
            config: the content of `config.json`.
            source: the path of that file.

        Raises:
            UserError: something that `RecurrentLM` does not compute.
        """

    @staticmethod
    @abstractmethod
    def write(model: RecurrentLM) -> str:
        """The text of `config.json`.

        Raises:
            UserError: something that the layout cannot hold.
        """

    @staticmethod
    @abstractmethod
    def save(model: RecurrentLM, folder: Path) -> None:
        """Writes the weights into the file that the layout's readers look for."""


LAYOUTS: Registry[Layout] = Registry("layout")


def rename(name: str, beginnings: Mapping[str, str]) -> str:
    """A name with another beginning; one that begins with none of them is left as it is."""
    for start, other in beginnings.items():
        if name.startswith(start):
            return other + name.removeprefix(start)
    return name


def renamed(model: RecurrentLM, names: Mapping[str, str]) -> dict[str, Tensor]:
    weights = model.state_dict()
    return {rename(name, names): tensor.contiguous() for name, tensor in weights.items()}


def build(options: Mapping[str, Any], source: str, **config: Any) -> RecurrentConfig:
    """Our configuration, in which an option of the cell that has its default is not spelled out."""
    defaults = Mamba2.__init__.__kwdefaults__ or {}
    given = {name: options[name] for name in keyword_options(Mamba2) if name in options}
    limit = given.get("dt_limit")
    if limit is not None:
        # No dt is below 0, so that a lower limit of 0 and an infinite upper one are none.
        given["dt_limit"] = None if tuple(map(float, limit)) == (0.0, math.inf) else list(limit)
    spelled = {name: value for name, value in given.items() if value != defaults[name]}
    return build_config(
        RecurrentConfig, {**config, "mixer": {"kind": "mamba2", **spelled}}, source=source
    )


def cell_of(model: RecurrentLM, reader: str) -> Mamba2:
    """The first of a model's cells, which are all alike.

    Raises:
        UserError: the model is another one than a published Mamba-2 can be.
    """
    config, cell = model.config, model.mixers[0]
    reasons = {
        f"{config.mixer['kind']} cells": isinstance(cell, Mamba2),
        f"{config.block} blocks": config.block == "residual",
        f"{config.position['kind']} positions": config.position["kind"] == "none",
    }
    for reason, fits in reasons.items():
        if not fits:
            raise UserError(
                f"{reader} has no place for {reason}: give a model of mamba2 cells in residual "
                "blocks without positions"
            )
    assert isinstance(cell, Mamba2)
    return cell
