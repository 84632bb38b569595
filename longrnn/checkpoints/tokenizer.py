"""Loads tokenizers by name or path as `longrnn.text.Tokenizer`."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from longrnn.checkpoints.folder import read_config
from longrnn.checkpoints.names import (
    GGUF,
    CheckpointName,
    base_of,
    embedded,
    is_adapter,
    resolve,
    split_spec,
)
from longrnn.checksums import verify_folder
from longrnn.errors import UserError
from longrnn.files import one_line
from longrnn.hf.tokenizer import TOKENIZER_FILES, HFTokenizer, byte_level, panics_as_errors
from longrnn.text import ByteTokenizer, Tokenizer

NO_BOS = "the tokenizer has no BOS token to put in front of texts: do not ask for one"
MISSING = (
    "no tokenizer at {}: give 'bytes', a tokenizer.json, or a folder with one; put the "
    "tokenizer that a checkpoint was trained with into its folder (published Mamba-2: "
    "EleutherAI/gpt-neox-20b)"
)


def load_tokenizer(
    name_or_path: str | Path = "bytes", *, add_bos_token: bool | None = None
) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name_or_path: `bytes`; a checkpoint, as `load` takes it, for its tokenizer; a folder with
            the files of a Hugging Face tokenizer; a `tokenizer.json`; or a GGUF file.
        add_bos_token: whether BOS is put in front of texts (`Tokenizer.bos_id`); by default as
            the name says (`CHECKPOINT+bos`, `CHECKPOINT+no_bos`), or else the tokenizer's files.

    Raises:
        UserError: the tokenizer is missing or damaged.
    """
    parsed = CheckpointName.parse(str(name_or_path))
    name, named_bos = parsed.checkpoint, parsed.bos
    add_bos_token = named_bos if add_bos_token is None else add_bos_token
    path = Path(name)
    if name != "bytes" and not os.path.isfile(path):
        path = resolve(name)
    if is_adapter(path):
        return load_tokenizer(base_of(path), add_bos_token=add_bos_token)
    config = read_config(path) if (path / "config.json").is_file() else {}
    if config.get("model_type") == "longrnn" and not (path / "tokenizer.json").is_file():
        name = config.get("tokenizer", "bytes")
        path, config = path / str(name), {}
    if name == "bytes":
        if add_bos_token:
            raise UserError(NO_BOS)
        return ByteTokenizer()
    # Not `Path.is_file`, which raises for a name that is too long for a file.
    places = (path, *(os.path.join(path, file) for file in TOKENIZER_FILES))
    if not any(map(os.path.isfile, places)):
        raise UserError(MISSING.format(path))
    tokenizer = _read(path, {} if add_bos_token is None else {"add_bos_token": add_bos_token})
    if add_bos_token and tokenizer.tokenizer.bos_token is None:
        raise UserError(NO_BOS)
    verify_folder(path if path.is_dir() else path.parent, TOKENIZER_FILES)
    return tokenizer


def _read(path: Path, options: Mapping[str, Any]) -> HFTokenizer:
    """The tokenizer in a folder or in a `tokenizer.json`, with the settings beside it."""
    from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    has_settings = file.suffix == GGUF or (folder / "tokenizer_config.json").is_file()
    if file.suffix == GGUF:
        options = {**options, "gguf_file": file.name}
    try:
        if file.is_file() and not has_settings:
            with panics_as_errors():
                return HFTokenizer(PreTrainedTokenizerFast(tokenizer_file=str(file), **options))
        # transformers warns of a model type that it does not know, and would read nothing else.
        config = read_config(folder) if (folder / "config.json").is_file() else {}
        if config.get("model_type") == "longrnn":
            options = {**options, "config": PreTrainedConfig()}
        with panics_as_errors():
            return HFTokenizer(
                AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
            )
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(
            f"{path} is not a tokenizer ({one_line(error)}): download it again"
        ) from error


def own_tokenizers() -> AbstractContextManager[Any]:
    """Replace `AutoTokenizer.from_pretrained` in a context, for code that allows remote code.

    A name that `load_tokenizer` takes, also one with a mitigation, gives that tokenizer; any other
    is loaded without remote code.
    """
    from transformers import AutoTokenizer

    before = AutoTokenizer.from_pretrained

    def from_pretrained(name: Any, *arguments: Any, **options: Any) -> Any:
        checkpoint = split_spec(str(name))[0]
        is_local = checkpoint in embedded() or os.path.exists(checkpoint)
        if options.get("trust_remote_code") and is_local:
            tokenizer = load_tokenizer(str(name))
            return (tokenizer if isinstance(tokenizer, HFTokenizer) else byte_level()).tokenizer
        return before(name, *arguments, **options | {"trust_remote_code": False})

    return patch.object(AutoTokenizer, "from_pretrained", from_pretrained)
