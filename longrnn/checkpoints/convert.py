"""Converts Mamba checkpoints between the layouts of longrnn, mamba-ssm and transformers."""

import shutil
from pathlib import Path
from typing import Any

from longrnn.checkpoints import layouts
from longrnn.checkpoints.folder import read_config
from longrnn.checkpoints.layouts import LAYOUTS, OURS
from longrnn.checkpoints.load import load
from longrnn.checkpoints.names import GENERATION, INITIAL_STATE, CheckpointName, base_folder
from longrnn.checkpoints.tokenizer import load_tokenizer
from longrnn.checksums import complete_folder
from longrnn.errors import UserError, nearest
from longrnn.hf.tokenizer import TOKENIZER_FILES, HFTokenizer, byte_level
from longrnn.mitigations.spec import NONE
from longrnn.models import LanguageModel, RecurrentLM
from longrnn.models.fold import fold
from longrnn.models.trainable import OF_CHECKPOINT
from longrnn.state import save

COPIED = (*TOKENIZER_FILES, GENERATION)


def convert(source: str | Path, destination: Path, *, to: str) -> None:
    """Write a checkpoint in another layout; every weight keeps its bits and its dtype.

    A mitigation that weights can express is folded into them (see `longrnn.models.fold`). The
    tokenizer is copied, if there is one. In other layouts than ours, the byte tokenizer becomes a
    `tokenizer.json`.

    Args:
        source: a checkpoint, as `load` takes it, with the mitigation that it records or names; an
            adapter is merged into its base in float32.
        destination: a folder that does not exist or is empty; it appears complete or not at all.
        to: `ours`, which records a mitigation that does not fold; `native` (mamba-ssm); or `hf`
            (transformers: its Mamba models, and a hybrid as what it is).

    Raises:
        UserError: the checkpoint cannot be loaded, or the layout does not support it or its
            mitigation; or the destination is in use.
    """
    if to not in LAYOUTS:
        raise UserError(f"unknown layout {to!r}: {nearest(to, LAYOUTS)}")
    write_checkpoint(load(source), CheckpointName.parse(str(source)).checkpoint, destination, to)


def layout_of(checkpoint: str) -> str:
    """Return the name of the layout of a checkpoint; `hf` for Hugging Face models of any kind."""
    return layouts.layout_of(read_config(base_folder(checkpoint))) or "hf"


def write_checkpoint(model: LanguageModel, checkpoint: str, destination: Path, to: str) -> None:
    """Write a loaded model; see `convert`.

    Args:
        model: its mitigation is folded into its weights where possible.
        checkpoint: its name, which has the tokenizer.
        destination: a folder, as for `convert`.
        to: a layout.
    """
    is_hybrid = not isinstance(model, RecurrentLM)
    if is_hybrid and (to != "hf" or not model.cells):
        raise UserError(
            f"{checkpoint} is a Hugging Face {getattr(model, 'kind', 'model')}, whose other layers "
            "longrnn does not compute: give a checkpoint of longrnn, or convert a hybrid to hf"
        )
    rest = fold(model)
    names = " and ".join(part.name for part in rest.parts)
    if names and to != OURS:
        raise UserError(
            f"{names} of {checkpoint} cannot be folded into weights, and the layout {to} records "
            f"no mitigation: {'' if is_hybrid else 'convert it to ours, which does, or '}load "
            f"{checkpoint}+MITIGATION with longrnn; {checkpoint}+{NONE} leaves it out"
        )
    if model.start is not None and to != OURS and not is_hybrid:
        raise UserError(
            f"{checkpoint} starts from a state, which the layout {to} does not have: convert it to "
            "ours, or convert the checkpoint without a state"
        )
    folder = base_folder(checkpoint)
    with complete_folder(destination, "choose another folder") as draft:
        tokenizer = _write_tokenizer(folder, draft, bytes_too=to != OURS)
        if model.start is not None:
            save(model.start, draft / INITIAL_STATE, recorded=OF_CHECKPOINT)
        if is_hybrid:
            from longrnn.hf.hybrid.trainable import write_hybrid

            plain: Any = model.under(None)
            write_hybrid(plain, draft, plain.spec)  # with the window of attention alone
        else:
            model.trained_under = str(rest) or None
            LAYOUTS[to].save(model, draft, tokenizer)
            if layout_of(checkpoint) == "hf" and not (draft / GENERATION).is_file():
                from transformers import AutoConfig, GenerationConfig

                config = AutoConfig.from_pretrained(folder, local_files_only=True)
                GenerationConfig.from_model_config(config).save_pretrained(draft)


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
