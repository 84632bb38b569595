"""The contract of a component: a feature of a run beside the training step itself."""

from __future__ import annotations

from abc import ABC
from typing import Any


class Component(ABC):
    """A feature of a run, whose decisions are the same in all processes.

    Attributes:
        name: the key of what it remembers in a checkpoint.
    """

    name: str

    def content(self) -> dict[str, Any]:
        """What a checkpoint holds: plain values, which `restore` reads back."""
        return {}

    def restore(self, content: dict[str, Any]) -> None:  # noqa: B027 (most remember nothing)
        """Restores what `content` returned; empty for a checkpoint of an earlier version."""
