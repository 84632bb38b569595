"""Hugging Face tokenizers as `longrnn.text.Tokenizer`."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from longrnn.checksums import remove_checksums
from longrnn.errors import UserError
from longrnn.files import one_line, read_json, write_atomic
from longrnn.options import validated
from longrnn.text import utf8

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
            with panics_as_errors():
                return self.tokenizer(list(texts), add_special_tokens=False, **options)
        except Exception as error:  # the tokenizers library raises bare Exception
            text = "".join(texts)
            if self._backend.normalizer is not None:
                with suppress(ValueError), panics_as_errors():
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
                raise OSError(errno.EIO, one_line(error), draft) from error
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
def panics_as_errors() -> Iterator[None]:
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
