"""Converts Mamba checkpoints between the layouts of longrnn, mamba-ssm and transformers."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from longrnn.checksums import write_checksums
from longrnn.errors import UserError, nearest
from longrnn.files import new_folder, partial_path, sync_folder, write_atomic
from longrnn.hf.layouts import LAYOUTS
from longrnn.hf.load import load_recurrent
from longrnn.hf.names import NONE, CheckpointName, base_of, is_adapter, resolve
from longrnn.hf.tokenizer import TOKENIZER_FILES, HFTokenizer, byte_level, load_tokenizer
from longrnn.locks import locked
from longrnn.models.checkpoint import read_config, save_model

logger = logging.getLogger(__name__)

OURS = "ours"
COPIED = (*TOKENIZER_FILES, "generation_config.json")


def convert(source: str | Path, destination: Path, *, to: str) -> None:
    """Write a checkpoint in another layout; every weight keeps its bits and its dtype.

    The tokenizer is copied, if there is one. In other layouts than ours, the byte tokenizer becomes
    a `tokenizer.json`.

    Args:
        source: a checkpoint, as `load` takes it; an adapter is merged into its base in float32.
        destination: a folder that does not exist or is empty; it appears complete or not at all.
        to: `ours`, `native` (mamba-ssm) or `hf` (transformers' MambaForCausalLM,
            FalconMambaForCausalLM or Mamba2ForCausalLM).

    Raises:
        UserError: the checkpoint cannot be loaded or the layout does not support it; or the
            destination is in use.
    """
    known = [OURS, *LAYOUTS]
    if to not in known:
        raise UserError(f"unknown layout {to!r}: {nearest(to, known)}")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination} exists already: give a new folder")
    folder = resolve(source)
    model = load_recurrent(CheckpointName(str(source), mitigation=NONE))
    while is_adapter(folder):
        folder = resolve(base_of(folder))  # which has the tokenizer
    # What the layout does not support is refused before anything is written.
    config = None if to == OURS else LAYOUTS[to].write(model)

    draft = partial_path(destination.absolute())
    with locked(destination, instead="choose another folder"):
        new_folder(draft)  # in place of that of a conversion that was killed
        try:
            tokenizer = _write_tokenizer(folder, draft, bytes_too=config is not None)
            if config is None:
                save_model(model, draft, tokenizer=tokenizer)
            else:
                write_atomic(draft / "config.json", config)
                LAYOUTS[to].save(model, draft)
            write_checksums(draft)
            os.rename(draft, destination)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    sync_folder(destination.parent)
    if model.trained_under is not None and to != OURS:
        logger.warning(
            f"{source} was trained under {model.trained_under}, which the layout {to} does not "
            f"record: load it as {destination}+{model.trained_under}"
        )


def _write_tokenizer(source: Path, destination: Path, *, bytes_too: bool) -> str:
    """Writes the tokenizer of a checkpoint into a folder.

    Args:
        source: the folder of the checkpoint.
        destination: the folder.
        bytes_too: whether to write a `tokenizer.json` for the tokenizer of bytes.

    Returns:
        What a configuration of longrnn is to have as its tokenizer.
    """
    copied = [name for name in COPIED if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, destination / name)
    recorded = str(read_config(source).get("tokenizer"))
    if any(name in TOKENIZER_FILES for name in copied):
        return "tokenizer.json"
    if recorded == "bytes" and bytes_too:
        byte_level().save(destination)
    elif recorded != "bytes" and (source / recorded).exists():  # outside of the folder
        tokenizer = load_tokenizer(source)
        assert isinstance(tokenizer, HFTokenizer)
        tokenizer.save(destination)
    return "bytes" if recorded == "bytes" else "tokenizer.json"
