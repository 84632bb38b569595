"""`Layout`, the interface of a checkpoint layout, and functions that all layouts share.

Every layout stores a `RecurrentLM` of `mamba2` cells under other names. A checkpoint that
`RecurrentLM` cannot compute exactly is refused, never approximated.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from longrnn.cells.mamba2 import Mamba2
from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.registry import Registry, keyword_options

# Prefixes of weight names: ours, and those of mamba-ssm.
NAMES = {
    "embedding.": "backbone.embedding.",
    "blocks.": "backbone.layers.",
    "norm.": "backbone.norm_f.",
    "head.": "lm_head.",
}


class Layout(ABC):
    """A file format of Mamba-2 checkpoints.

    Attributes:
        names: prefixes of weight names, from ours to those of the layout.
    """

    names: ClassVar[Mapping[str, str]]

    @staticmethod
    @abstractmethod
    def is_described(config: Mapping[str, Any]) -> bool:
        """Whether the content of a `config.json` is of this layout."""

    @staticmethod
    @abstractmethod
    def read(config: Mapping[str, Any], source: str) -> RecurrentConfig:
        """Return our configuration of the model.

        Args:
            config: the content of `config.json`.
            source: the path of that file, for messages.

        Raises:
            UserError: the model has an option that `RecurrentLM` does not support.
        """

    @staticmethod
    @abstractmethod
    def write(model: RecurrentLM) -> str:
        """Return the text of `config.json`.

        Raises:
            UserError: the model has an option that the layout does not support.
        """

    @staticmethod
    @abstractmethod
    def save(model: RecurrentLM, folder: Path) -> None:
        """Write the weights into the file that the layout's readers expect."""


LAYOUTS: Registry[Layout] = Registry("layout")


def rename(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with its prefix replaced; a name with none of the prefixes is unchanged."""
    for start, other in prefixes.items():
        if name.startswith(start):
            return other + name.removeprefix(start)
    return name


def renamed(model: RecurrentLM, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the weights of a model under the names of a layout."""
    weights = model.state_dict()
    return {rename(name, names): tensor.contiguous() for name, tensor in weights.items()}


def build(options: Mapping[str, Any], source: str, **config: Any) -> RecurrentConfig:
    """Return our configuration; options of the cell that have their default value are left out."""
    defaults = Mamba2.__init__.__kwdefaults__ or {}
    given = {name: options[name] for name in keyword_options(Mamba2) if name in options}
    limit = given.get("dt_limit")
    if limit is not None:
        # dt is never below 0: limits of 0 and infinity do not limit it.
        given["dt_limit"] = None if tuple(map(float, limit)) == (0.0, math.inf) else list(limit)
    spelled = {name: value for name, value in given.items() if value != defaults[name]}
    return build_config(
        RecurrentConfig, {**config, "mixer": {"kind": "mamba2", **spelled}}, source=source
    )


def cell_of(model: RecurrentLM, reader: str) -> Mamba2:
    """Return the first cell of a model; all cells have the same options.

    Raises:
        UserError: the model is not one that a published Mamba-2 checkpoint can describe.
    """
    config, cell = model.config, model.cells[0]
    reasons = {
        f"{config.mixer['kind']} cells": isinstance(cell, Mamba2),
        f"{config.block} blocks": config.block == "residual",
        f"{config.position['kind']} positions": config.position["kind"] == "none",
    }
    for reason, fits in reasons.items():
        if not fits:
            raise UserError(
                f"{reader} does not support {reason}: give a model of mamba2 cells in residual "
                "blocks without positions"
            )
    assert isinstance(cell, Mamba2)
    return cell
