"""Tokenizers by name or path, behind the package's own small interface."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from longrnn.errors import UserError
from longrnn.files import write_atomic
from longrnn.hf.loading import embedded
from longrnn.models.checkpoint import read_description
from longrnn.text import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "The naïve reader's 1,024 tokens — tabs\t, lines\n\n, and Ünïcödé: 你好."


class HFTokenizer:
    """A tokenizer of `transformers` as a `longrnn.text.Tokenizer`.

    Args:
        tokenizer: any; its special tokens are neither added nor hidden.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Writes its files, so that `load_tokenizer` finds it in `folder`."""
        with TemporaryDirectory() as draft:
            self.tokenizer.save_pretrained(draft)
            for file in sorted(Path(draft).iterdir()):
                write_atomic(folder / file.name, file.read_bytes())

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def byte_ends(self, text: str) -> list[int] | None:
        """See `longrnn.text.Tokenizer`. Tokens that share a character all end with it."""
        if not getattr(self.tokenizer, "is_fast", False):
            return None
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        # Offsets count characters.
        bytes_up_to = [0, *accumulate(len(character.encode()) for character in text)]
        ends = [bytes_up_to[stop] for _, stop in found["offset_mapping"]]
        return [*accumulate(ends[:-1], max), bytes_up_to[-1]] if ends else []

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the SHA-256 of what turns a text into ids."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:  # a tokenizer written in Python: its vocabulary, and the ids of a text
            parts: Any = [sorted(self.tokenizer.get_vocab().items()), self.encode(PROBE)]
        else:
            whole = json.loads(backend.to_str())
            parts = [whole[name] for name in ("added_tokens", "normalizer", "pre_tokenizer")]
            parts.append(whole["model"])
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def load_tokenizer(name_or_path: str | Path = "bytes") -> Tokenizer:
    """Loads a tokenizer.

    Args:
        name_or_path: `bytes`; a checkpoint of ours (its tokenizer is meant), embedded or a folder;
            a folder of `transformers`; or a `tokenizer.json`.

    Raises:
        UserError: nothing of the kind is there.
    """
    if str(name_or_path) == "bytes":
        return ByteTokenizer()
    path = embedded().get(str(name_or_path), Path(name_or_path))
    if (path / "config.json").is_file() and not (path / "tokenizer.json").is_file():
        recorded = read_description(path).get("tokenizer", "bytes")
        return load_tokenizer(recorded if recorded == "bytes" else path / recorded)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"no tokenizer at {name_or_path}: give 'bytes', a tokenizer.json, or a folder with one"
        )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if (file.parent / "tokenizer_config.json").is_file():
            return HFTokenizer(AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False))
        return HFTokenizer(PreTrainedTokenizerFast(tokenizer_file=str(file)))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(f"{file} is no tokenizer ({error}): download it again") from error
