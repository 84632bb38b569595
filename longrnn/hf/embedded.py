"""The checkpoints that travel with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def embedded() -> dict[str, Path]:
    """The checkpoints that travel with the package, by name."""
    root = Path(str(files("longrnn"))) / "checkpoints"
    return {folder.name: folder for folder in sorted(root.iterdir()) if folder.is_dir()}
