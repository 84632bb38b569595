"""Converts Mamba-2 checkpoints between the layouts of longrnn, mamba-ssm and transformers."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from longrnn.checksums import write_checksums
from longrnn.errors import UserError, nearest
from longrnn.files import sync_folder, write_atomic
from longrnn.hf.layouts import LAYOUTS
from longrnn.hf.load import load_recurrent
from longrnn.hf.names import NONE, base_of, is_adapter, resolve
from longrnn.hf.tokenizer import TOKENIZER_FILES, HFTokenizer, byte_level, load_tokenizer
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
        to: `ours`, `native` (mamba-ssm) or `hf` (Mamba2ForCausalLM of transformers).

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
    model = load_recurrent(f"{source}+{NONE}")
    while is_adapter(folder):
        folder = resolve(base_of(folder))  # which has the tokenizer
    recorded = str(read_config(folder).get("tokenizer"))
    # What the layout does not support is refused before anything is written.
    config = None if to == OURS else LAYOUTS[to].write(model)

    with TemporaryDirectory(dir=destination.parent, prefix=".") as drafts:
        draft = Path(drafts) / destination.name
        draft.mkdir()
        copied = [name for name in COPIED if (folder / name).is_file()]
        for name in copied:
            shutil.copyfile(folder / name, draft / name)
        has_tokenizer = any(name in TOKENIZER_FILES for name in copied)
        is_bytes = recorded == "bytes" and not has_tokenizer
        if not has_tokenizer and (folder / recorded).exists():  # outside of the folder
            own = load_tokenizer(folder)
            assert isinstance(own, HFTokenizer)
            own.save(draft)
        if config is None:
            save_model(model, draft, tokenizer="bytes" if is_bytes else "tokenizer.json")
        else:
            if is_bytes:
                byte_level().save(draft)
            write_atomic(draft / "config.json", config)
            LAYOUTS[to].save(model, draft)
        write_checksums(draft)
        os.rename(draft, destination)
    sync_folder(destination.parent)
    if model.trained_under is not None and to != OURS:
        logger.warning(
            f"{source} was trained under {model.trained_under}, which the layout {to} does not "
            f"record: load it as {destination}+{model.trained_under}"
        )
