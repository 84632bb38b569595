"""What a checkpoint's name stands for: `CHECKPOINT+DTYPE+MITIGATION`, and the folder of its files.

A checkpoint is embedded in the package, a folder, or `organisation/model` on the Hugging Face Hub,
from which it is downloaded into the cache of `huggingface_hub`.
"""

from __future__ import annotations

import os
import re
from importlib.resources import files
from pathlib import Path

import torch

from longrnn.checksums import MODEL_FILES, PICKLES
from longrnn.errors import UserError, nearest
from longrnn.files import read_json
from longrnn.mitigations.spec import split
from longrnn.models.checkpoint import DTYPES

# The mitigation that changes nothing.
NONE = "none"
# In place of a mitigation: lifts the maximum length of a Hugging Face model.
BEYOND = "beyond"
# Likewise: limits the attention layers of a hybrid.
WINDOW = "attention_window"
# Likewise: load the weights in this dtype.
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}

# A device: the layers of a Hugging Face model are divided among all devices.
BALANCED = "balanced"

# Files of an adapter of PEFT, and what longrnn records beside them.
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_RECORD = "adapter.json"

# Checksums that the Hub publishes: SHA-256 of a large file, or git's SHA-1 of a small one.
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def embedded() -> dict[str, Path]:
    """Return the folders of the checkpoints that come with the package, by name."""
    root = Path(str(files("longrnn"))) / "checkpoints"
    return {folder.name: folder for folder in sorted(root.iterdir()) if folder.is_dir()}


def split_spec(text: str) -> tuple[str, str | None]:
    """Split `CHECKPOINT+MITIGATION` into both; the mitigation is None if there is no plus.

    The name of a folder may contain a plus, and so may the file of a calibrated mitigation: the
    checkpoint is the longest prefix that exists.
    """
    pluses = [index for index, character in enumerate(text) if character == "+"]
    for cut in (len(text), *reversed(pluses)):
        # `Path.exists` fails at names that are too long for a file.
        if text[:cut] in embedded() or os.path.exists(text[:cut]):
            break
    else:
        cut = pluses[0] if pluses else len(text)
    return text[:cut], text[cut + 1 :] if cut < len(text) else None


def split_dtype(spec: str | None) -> tuple[torch.dtype | None, str | None]:
    """Split the dtype of the weights off what follows a checkpoint: `float32+state_norm(…)`.

    Raises:
        UserError: there are several.
    """
    parts = [] if spec is None else split(spec)
    found = [DTYPE_NAMES[part] for part in parts if part in DTYPE_NAMES]
    if len(found) > 1:
        raise UserError(f"{spec} has {len(found)} dtypes: give one of {', '.join(DTYPE_NAMES)}")
    if not found:
        return None, spec
    return found[0], "+".join(part for part in parts if part not in DTYPE_NAMES) or None


def resolve(name_or_path: str | Path, revision: str | None = None) -> Path:
    """Return the checkpoint folder for a name or path; a model from the Hub is downloaded.

    Raises:
        UserError: there is no such checkpoint.
    """
    name, known = str(name_or_path), embedded()
    path = known.get(name, Path(name_or_path))
    if os.path.isdir(path):  # unlike `Path.is_dir`, also for a name that is too long
        if revision is not None:
            raise UserError(f"{name} is a local checkpoint and has no revisions: leave it out")
        for file in path.iterdir():
            if file.exists() and not file.is_file() and not file.is_dir():  # it may have no end
                raise UserError(f"{file} is a device or a pipe, not a file: copy the folder again")
        return path
    if os.path.exists(path):
        raise UserError(f"{path} is a file: give the folder that contains it")
    if is_hub_name(name):
        return download(name, revision)
    beside = [str(one) for one in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(
        f"no checkpoint {name!r}, neither embedded nor a folder: "
        f"{nearest(name, [*known, *(beside if path.name != name else [])])}"
    )


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form `organisation/model` and `organisation` is not a local folder."""
    return NAME.fullmatch(name) is not None and not os.path.exists(Path(name).parent)


def download(name: str, revision: str | None = None) -> Path:
    """Return the folder in the Hub's cache with the files of a model; download missing files.

    Args:
        name: `organisation/model`.
        revision: a branch, tag or commit; None for the main branch.

    Raises:
        UserError: the Hub has no such model or revision, or cannot be reached.
    """
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*MODEL_FILES]))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, revision=revision, allow_patterns=[*PICKLES])
        return folder
    except (
        errors.HFValidationError,
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
    ) as error:
        version = "" if revision is None else f" with the revision {revision!r}"
        raise UserError(
            f"no checkpoint {name!r}{version}, neither a folder nor a model on the Hub that you "
            "may read: check the name, accept the model's terms on its page, and log in with "
            "`hf auth login`"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:  # also where it is not in the cache
        raise UserError(
            f"no folder {name}, and the Hugging Face Hub cannot be reached for the model of that "
            f"name: download it elsewhere with `hf download {name}` and give its folder, or copy "
            "the cache and point HF_HOME to it"
        ) from error


def has_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, alone or beside the model that it was trained on."""
    return (folder / ADAPTER).is_file()


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no whole model."""
    return has_adapter(folder) and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """Name or path of the base model of an adapter.

    Raises:
        UserError: the adapter does not name it.
    """
    base = read_json(folder / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{folder / ADAPTER} names no base model: write it there as base_model_name_or_path"
        )
    return base
