"""Loads tokenizers by name or path as `longrnn.text.Tokenizer`."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from longrnn.checksums import remove_checksums, verify_folder
from longrnn.errors import UserError
from longrnn.files import one_line, read_json, write_atomic
from longrnn.hf.names import (
    GGUF,
    CheckpointName,
    base_of,
    embedded,
    is_adapter,
    is_hub_name,
    resolve,
    split_spec,
)
from longrnn.models.checkpoint import read_config
from longrnn.options import validated
from longrnn.text import ByteTokenizer, Tokenizer, utf8

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
)
NO_BOS = "the tokenizer has no BOS token to put in front of texts: do not ask for one"
MISSING = (
    "no tokenizer at {}: give 'bytes', a tokenizer.json, or a folder with one; put the "
    "tokenizer that a checkpoint was trained with into its folder (published Mamba-2: "
    "EleutherAI/gpt-neox-20b)"
)
# Stands for unknown characters, and is not in the vocabulary: they are refused.
NO_TOKEN = "\0"
# Begins what the assistant wrote, in a chat template.
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")


class HFTokenizer:
    """A Hugging Face tokenizer as a `longrnn.text.Tokenizer`.

    Args:
        tokenizer: of transformers, with a `tokenizer.json`. Encoding adds no special tokens, and
            decoding keeps them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.eos_id: int | None = tokenizer.eos_token_id  # type: ignore[assignment]
        self._backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        # What the tokenizer puts around a text; the mask shows whether the first one is in front.
        self._around: list[int] = self._backend.encode("").ids
        self.bos_id: int | None = None
        if self._around:
            probe = self._backend.encode(self._backend.id_to_token(self._around[0]))
            self.bos_id = probe.ids[0] if probe.special_tokens_mask[0] else None

    def encode(self, text: str) -> list[int]:
        utf8(text)  # the tokenizers library would raise a TypeError that does not say why
        return self._encoded([text])["input_ids"][0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encoded(texts)["input_ids"] if texts else []

    def _encoded(self, texts: Sequence[str], **options: Any) -> Any:
        try:
            with _panics_as_errors():
                return self.tokenizer(list(texts), add_special_tokens=False, **options)
        except Exception as error:  # the tokenizers library raises bare Exception
            text = "".join(texts)
            if self._backend.normalizer is not None:
                with suppress(ValueError), _panics_as_errors():
                    text = self._backend.normalizer.normalize_str(text)
            unknown = "".join(sorted(set(text) - self._backend.get_vocab().keys()))[:20]
            raise UserError(
                f"the tokenizer cannot encode a text ({one_line(error)}), perhaps because of "
                f"{unknown!a}: replace these characters in the text, or by `replace` where "
                "the tokenizer was made"
            ) from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """See `longrnn.text.Tokenizer`. The chat template marks what the assistant wrote."""
        if not GENERATION_TAG.search(str(self.tokenizer.chat_template)):
            raise UserError(
                "the tokenizer has no chat template that says which text the assistant wrote: put "
                "a chat_template.jinja with {% generation %} and {% endgeneration %} around that "
                "text beside its tokenizer.json, or give prompt and completion"
            )
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception as error:  # a template may raise anything
            raise ValueError(f"its chat template refuses it, {one_line(error)}") from error
        return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files, so that `load_tokenizer` finds it in `folder`."""
        for key in ("is_local", "local_files_only"):  # how it was loaded on this machine
            self.tokenizer.init_kwargs.pop(key, None)
        with TemporaryDirectory() as draft:
            try:
                self.tokenizer.save_pretrained(draft)
            except Exception as error:  # the tokenizers library raises bare Exception
                code = re.search(r"os error (\d+)", str(error))
                if code is None:
                    raise
                raise OSError(int(code[1]), os.strerror(int(code[1])), draft) from error
            remove_checksums(folder)
            for file in sorted(Path(draft).iterdir()):
                write_atomic(folder / file.name, file.read_bytes())

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """See `longrnn.text.Tokenizer`. Tokens that share a character all end where it ends."""
        encoded = self._encoded([text], return_offsets_mapping=True)
        # Offsets count characters.
        bytes_up_to = [0, *accumulate(len(character.encode()) for character in text)]
        ends = [bytes_up_to[stop] for _, stop in encoded["offset_mapping"][0]]
        ids = encoded["input_ids"][0]
        return ids, [*accumulate(ends[:-1], max), bytes_up_to[-1]] if ends else []

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits of the SHA-256 of everything that determines the ids."""
        whole = json.loads(self._backend.to_str())
        names = ("added_tokens", "normalizer", "pre_tokenizer", "model")
        parts = [whole[name] for name in names]
        parts += [self._around, self.bos_id] if self._around else []
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Within this context a panic of the tokenizers library, a BaseException, is a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizers library fails: {one_line(error)}") from error


def byte_level() -> HFTokenizer:
    """Return a Hugging Face tokenizer with the ids of `ByteTokenizer`: one per byte of UTF-8."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = bytes_to_unicode()  # the character that stands for each byte value
    fast = Fast(BPE(vocab={names[byte]: byte for byte in range(256)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))


def character_level(path: Path, replace: Mapping[str, str], vocab_size: int) -> HFTokenizer:
    """Return a Hugging Face tokenizer with one id per character.

    Args:
        path: a JSON file with the id of each character.
        replace: texts that take the place of characters before texts are encoded.
        vocab_size: number of ids, from 0.

    Raises:
        UserError: it cannot be read or holds something else.
    """
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Fast
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = validated(dict[str, int], read_json(path), str(path))
    if sorted(vocabulary.values()) != [*range(vocab_size)]:
        raise UserError(
            f"{path} has {len(vocabulary)} characters whose ids are not those from 0 to "
            f"{vocab_size - 1} of the weights, each once: give the file that belongs to them"
        )
    fast = Fast(WordLevel(vocab=vocabulary, unk_token=NO_TOKEN))
    fast.normalizer = normalizers.Sequence(
        [normalizers.Replace(old, new) for old, new in replace.items()]
    )
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = decoders.Fuse()
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))


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
    name, _, _, named_bos = CheckpointName.parse(str(name_or_path))
    add_bos_token = named_bos if add_bos_token is None else add_bos_token
    path = embedded().get(name, Path(name))
    if name != "bytes" and not os.path.exists(path):
        if not is_hub_name(name):
            raise UserError(MISSING.format(name))
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
            with _panics_as_errors():
                return HFTokenizer(PreTrainedTokenizerFast(tokenizer_file=str(file), **options))
        # transformers warns of a model type that it does not know, and would read nothing else.
        config = read_config(folder) if (folder / "config.json").is_file() else {}
        if config.get("model_type") == "longrnn":
            options = {**options, "config": PreTrainedConfig()}
        with _panics_as_errors():
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
