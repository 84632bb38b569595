"""Checkpoints that come with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def embedded() -> dict[str, Path]:
    """Return the folders of the checkpoints that come with the package, by name."""
    root = Path(str(files("longrnn"))) / "checkpoints"
    return {folder.name: folder for folder in sorted(root.iterdir()) if folder.is_dir()}
