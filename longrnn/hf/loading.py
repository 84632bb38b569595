"""`load`: a model by the name of an embedded checkpoint or by the path of a folder."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch

from longrnn.errors import UserError, nearest
from longrnn.models.checkpoint import load_model
from longrnn.models.recurrent import RecurrentLM


def embedded() -> dict[str, Path]:
    """The checkpoints that travel with the package, by name."""
    root = Path(str(files("longrnn"))) / "checkpoints"
    return {folder.name: folder for folder in sorted(root.iterdir()) if folder.is_dir()}


def resolve(name_or_path: str | Path) -> Path:
    """The folder that a name or path means.

    Raises:
        UserError: there is none.
    """
    known = embedded()
    if str(name_or_path) in known:
        return known[str(name_or_path)]
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{path} is a file: give the folder that contains it")
    raise UserError(
        f"no checkpoint {str(name_or_path)!r}, neither embedded nor a folder: "
        f"{nearest(str(name_or_path), known)}"
    )


def load(
    name_or_path: str | Path,
    *,
    backend: str = "auto",
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> RecurrentLM:
    """Loads a language model, ready for evaluation.

    Args:
        name_or_path: the name of an embedded checkpoint (`passkey-tiny`), or a folder that
            `longrnn train` wrote.
        backend: implementation of the recurrence (`auto`, `chunked`, `reference`).
        device: None for the CPU.
        dtype: None for that of the checkpoint.
        revision: of a hub checkpoint; local ones have none.

    Raises:
        UserError: unknown name, a folder that is incomplete, damaged or of another kind.
    """
    folder = resolve(name_or_path)
    if revision is not None:
        raise UserError(f"{name_or_path} is a local checkpoint and has no revisions: leave it out")
    return load_model(folder, backend=backend).to(device=device, dtype=dtype)
