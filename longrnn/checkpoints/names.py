"""What a checkpoint's name means: `CHECKPOINT+DTYPE+MITIGATION`, and the folder of its files.

A checkpoint is embedded in the package, a folder, or `organisation/model` on the Hugging Face Hub,
from which it is downloaded into the cache of `huggingface_hub`.
"""

from __future__ import annotations

import os
import re
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longrnn.checkpoints.folder import DTYPES
from longrnn.checksums import MODEL_FILES, PICKLES
from longrnn.config import RECORDED, read_recorded
from longrnn.errors import UserError, nearest
from longrnn.files import one_line, read_json
from longrnn.mitigations.spec import split
from longrnn.options import Tokens, validated

# In place of a mitigation: whether texts begin with BOS, where the tokenizer's files say otherwise.
BOS_NAMES = {"bos": True, "no_bos": False}
# Likewise: the file of the state from which the model starts, as `state(FILE)`.
FROM_STATE = "state"
# Likewise: load the weights in this dtype.
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}

# The ending of a file of llama.cpp, with quantized weights, configuration and tokenizer.
GGUF = ".gguf"
# Files of an adapter of PEFT, and what longrnn records beside them.
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_RECORD = "adapter.json"
# How transformers generates, with the tokens that end a text.
GENERATION = "generation_config.json"
# The state from which the model of a folder starts.
INITIAL_STATE = "initial_state.safetensors"

MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def embedded() -> dict[str, Path]:
    """Return the folders of the checkpoints that come with the package, by name."""
    root = Path(str(files("longrnn"))) / "checkpoints" / "embedded"
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


class CheckpointName(NamedTuple):
    """A name of a model in its parts.

    Attributes:
        checkpoint: the name of an embedded checkpoint, a folder, or `organisation/model`.
        dtype: of the weights; None for that of the checkpoint.
        mitigation: its parts; None for that which the checkpoint records.
        bos: whether texts begin with BOS; None for what the tokenizer does by default.
        start: the file of the state from which the model starts; None for that of the checkpoint.
    """

    checkpoint: str
    dtype: torch.dtype | None = None
    mitigation: tuple[str, ...] | None = None
    bos: bool | None = None
    start: str | None = None

    @classmethod
    def parse(cls, name: str | Path | CheckpointName) -> CheckpointName:
        """Read `CHECKPOINT+DTYPE+MITIGATION`, of which the last two may be left out."""
        if isinstance(name, CheckpointName):
            return name
        checkpoint, spec = split_spec(str(name))
        return cls(checkpoint).under(spec)

    def under(self, mitigation: str | None) -> CheckpointName:
        """Return the name of the same model under a mitigation, in a dtype, with a BOS or start.

        Raises:
            UserError: there are two dtypes.
        """
        parts = [] if mitigation is None else split(mitigation)
        named = self
        for part in parts:
            if part in DTYPE_NAMES:
                if named.dtype is not None:
                    raise UserError(f"{part!r} is a second dtype of {self.checkpoint}: give one")
                named = named._replace(dtype=DTYPE_NAMES[part])
            elif part in BOS_NAMES:
                named = named._replace(bos=BOS_NAMES[part])
            elif part.startswith(f"{FROM_STATE}(") and part.endswith(")"):
                if named.start is not None:
                    raise UserError(f"{part!r} is a second state of {self.checkpoint}: give one")
                named = named._replace(start=part[len(FROM_STATE) + 1 : -1])
            else:
                named = named._replace(mitigation=(*(named.mitigation or ()), part))
        return named

    @property
    def tokenizer(self) -> str:
        """The name by which `load_tokenizer` finds the tokenizer."""
        bos = [f"+{name}" for name, value in BOS_NAMES.items() if value == self.bos]
        return "".join([self.checkpoint, *bos])


def resolve(name_or_path: str | Path, revision: str | None = None, **hub: Any) -> Path:
    """Return the folder, or GGUF file, for a name or path; a model from the Hub is downloaded.

    Args:
        name_or_path: as for `load`.
        revision: likewise.
        hub: `token`, `cache_dir` and others of `huggingface_hub.snapshot_download`.

    Raises:
        UserError: there is no such checkpoint.
    """
    name, known = str(name_or_path), embedded()
    path = known.get(name, Path(name_or_path))
    # Unlike `Path.is_dir` and `Path.is_file`, also for a name that is too long.
    if (name and os.path.isdir(path)) or (path.suffix == GGUF and os.path.isfile(path)):
        if revision is not None:
            raise UserError(f"{name} is a local checkpoint and has no revisions: leave it out")
        return path
    if is_hub_name(name):
        return download(name, revision, **hub)
    parent = path.parent
    if os.path.isfile(path):
        raise UserError(f"{name} is a file, and a checkpoint is a folder or .gguf: give {parent}")
    inside = parent.iterdir() if os.path.isdir(parent) else ()
    beside = [str(entry) for entry in inside if entry.is_dir()]
    raise UserError(
        f"no checkpoint {name!r}, neither embedded nor a folder: "
        f"{nearest(name, [*known, *(beside if path.name != name else [])])}"
    )


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form `organisation/model` and `organisation` is not a local folder."""
    return MODEL_NAME.fullmatch(name) is not None and not os.path.exists(Path(name).parent)


def download(name: str, revision: str | None = None, **hub: Any) -> Path:
    """Return the folder in the Hub's cache with the files of a model; download missing files.

    Args:
        name: `organisation/model`.
        revision: a branch, tag or commit; None for the main branch.
        hub: see `resolve`.

    Raises:
        UserError: the Hub has no such model or revision, or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    fetch = partial(snapshot_download, name, revision=revision, **hub)
    try:
        folder = Path(fetch(allow_patterns=[*MODEL_FILES]))
        if not any(folder.glob("*.safetensors")):
            fetch(allow_patterns=[*PICKLES])
        return folder
    except (OSError, ValueError) as error:  # of which all errors of huggingface_hub are
        raise UserError(
            f"no folder {name}, and the Hugging Face Hub gives no model of that name "
            f"({one_line(error)}): check the name, log in with `hf auth login`, or download it "
            f"elsewhere with `hf download {name}` and point HF_HOME to the copied cache"
        ) from error


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no whole model."""
    return (folder / ADAPTER).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """Name or path of the base model of an adapter.

    Raises:
        UserError: the adapter does not name it, or names itself.
    """
    base = read_json(folder / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not base or Path(base).resolve() == folder.resolve():
        raise UserError(
            f"{folder / ADAPTER} names {base!r} as its base model: write there the name or folder "
            "of the base model as base_model_name_or_path"
        )
    return base


def base_folder(checkpoint: str) -> Path:
    """Return the folder of a checkpoint, for an adapter that of its base model.

    Raises:
        UserError: as `resolve` and `base_of`.
    """
    folder = resolve(checkpoint)
    while is_adapter(folder):
        folder = resolve(split_spec(base_of(folder))[0])
    return folder


def own_start(folder: Path) -> Path | None:
    """Return the file of the state from which the model of a folder starts; None for none.

    An adapter without one has that of its base model.
    """
    path = folder / INITIAL_STATE
    if path.is_file():
        return path
    return own_start(resolve(split_spec(base_of(folder))[0])) if is_adapter(folder) else None


def training_length(checkpoint: str) -> int:
    """Return the training length in tokens from a checkpoint's train.yaml.

    If a run carried its state, this is the length of one segment.

    Args:
        checkpoint: name, folder, or `CHECKPOINT+MITIGATION`.

    Raises:
        UserError: train.yaml is missing or damaged, or does not have the length.
    """
    folder = resolve(split_spec(checkpoint)[0])
    source = str(folder / RECORDED)
    lengths = validated(dict[str, Tokens], read_recorded(folder).get("length", {}), source)
    if "max" not in lengths:
        raise UserError(f"the training length of {checkpoint} is not known: give --train-length")
    return lengths["max"]
