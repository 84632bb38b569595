"""Tokenizers load by name or path, or are refused; chat templates say what an assistant wrote."""

import json
import logging
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Fast
from tokenizers import normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from longrnn import load_tokenizer
from longrnn.checkpoints.layouts import save_model
from longrnn.errors import UserError
from longrnn.hf.tokenizer import HFTokenizer, byte_level
from longrnn.text import ByteTokenizer
from tests.contracts.builders import build_model
from tests.refusals import naming
from tests.texts import trained_bpe

TEXT = "The passkey is 12345. Remember it. <s> naïve  \n"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a tokenizer folder as transformers writes it."""
    bpe: Any = trained_bpe()
    bpe.tokenizer.save_pretrained(tmp_path / "bpe")
    return tmp_path / "bpe"


def test_a_folder_and_its_file_give_the_same_tokenizer(saved: Path) -> None:
    for path in (saved, saved / "tokenizer.json", str(saved)):
        tokenizer = load_tokenizer(path)
        assert isinstance(tokenizer, HFTokenizer)
        assert tokenizer.vocab_size == trained_bpe().vocab_size
        assert tokenizer.encode(TEXT) == trained_bpe().encode(TEXT)
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
        with pytest.raises(UserError, match="UTF-8"):
            tokenizer.encode("a\udcff")


def test_a_checkpoint_gives_its_own_tokenizer(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("transformers").addHandler(caplog.handler)
    model = build_model("lstm", dtype=torch.float32)
    save_model(model, tmp_path / "bytes")
    assert isinstance(load_tokenizer(tmp_path / "bytes"), ByteTokenizer)
    save_model(model, tmp_path / "beside", tokenizer="../bpe")
    assert load_tokenizer(tmp_path / "beside").encode(TEXT) == trained_bpe().encode(TEXT)
    save_model(model, tmp_path / "inside", tokenizer="tokenizer.json")
    tokenizer = load_tokenizer(saved)
    assert isinstance(tokenizer, HFTokenizer)
    tokenizer.save(tmp_path / "inside")
    assert load_tokenizer(tmp_path / "inside").encode(TEXT) == trained_bpe().encode(TEXT)
    assert caplog.messages == []
    logging.getLogger("transformers").removeHandler(caplog.handler)


def small(merges: list[tuple[str, str]], **parts: Any) -> HFTokenizer:
    fast = Fast(BPE(vocab={"a": 0, "b": 1, "ab": 2, "ba": 3, "▁": 4, "\n": 5}, merges=merges))
    for name, part in parts.items():
        setattr(fast, name, part)
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))


def test_byte_ends_rise_to_the_end_of_the_text() -> None:
    """Also where the library trims the offsets of whitespace, and for text without a token."""
    trims = {"post_processor": processors.ByteLevel(trim_offsets=True)}
    tokenizer = small([], pre_tokenizer=pre_tokenizers.Metaspace(), **trims)
    assert tokenizer.encode_with_ends("\na é")[1] == [1, 1, 2, 5]


def test_fingerprints_identify_tokenizers(tmp_path: Path) -> None:
    one, other = small([("a", "b"), ("b", "a")]), small([("b", "a"), ("a", "b")])
    assert one.encode("aba") != other.encode("aba")
    assert one.fingerprint() == small([("a", "b"), ("b", "a")]).fingerprint()
    lower = small([("a", "b"), ("b", "a")], normalizer=normalizers.Lowercase())
    assert len({each.fingerprint() for each in (one, other, lower, ByteTokenizer())}) == 4
    one.save(tmp_path)
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(place).fingerprint() == one.fingerprint()


@pytest.mark.parametrize("text", ["", "a\0b\r\n", "né 你好 🙂", "<s>\ufffd\u2028"])
def test_bytes_survive_the_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size == 256 for i in ids)
    assert tokenizer.decode([97, 255, 300, 98]) == "a\ufffd\ufffdb", "any ids can be decoded"
    assert list(tokenizer.encode_with_ends("né")[1] or []) == [1, 2, 3]
    with pytest.raises(UserError, match="UTF-8"):
        tokenizer.encode("a\udcff")


TURN = "<|{{ m.role }}|>{{ m.content }}</s>"
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}"
    "{{ m.content }}</s>{% endgeneration %}{% else %}" + TURN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello you"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


def chat_tokenizer(template: str | None) -> HFTokenizer:
    """A tokenizer of bytes with an end-of-sequence token and a chat template."""
    inner = byte_level().tokenizer
    inner.add_special_tokens({"eos_token": "</s>"})
    inner.chat_template = template
    return HFTokenizer(inner)


def answers(template: str, messages: list[dict[str, str]]) -> list[str]:
    """The runs of tokens that the assistant wrote."""
    tokenizer = chat_tokenizer(template)
    ids, scored = tokenizer.encode_chat(messages)
    runs = groupby(zip(ids, scored, strict=True), key=itemgetter(1))
    return [tokenizer.decode([token for token, _ in run]) for is_answer, run in runs if is_answer]


def test_the_tokens_of_the_assistant() -> None:
    assert answers(MARKED, MESSAGES) == ["hello you</s>", "no</s>"]
    assert answers(MARKED, MESSAGES[:2]) == []


def test_what_has_no_template() -> None:
    with pytest.raises(UserError, match="chat_template.jinja"):
        chat_tokenizer(None).encode_chat(MESSAGES)
    with pytest.raises(UserError, match="template"):
        ByteTokenizer().encode_chat(MESSAGES)
    with pytest.raises(UserError, match="endgeneration"):
        chat_tokenizer(TURN).encode_chat(MESSAGES)
    refusing = "{% generation %}{{ raise_exception('roles must alternate') }}{% endgeneration %}"
    with pytest.raises(ValueError, match="refuses it, roles must alternate"):
        chat_tokenizer(refusing).encode_chat(MESSAGES)


def test_a_regular_expression_that_panics_is_one_sentence(tmp_path: Path) -> None:
    byte_level().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}
    content["pre_tokenizer"] = split | {"invert": False}
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=naming("cannot encode")):
        tokenizer.encode("x" * 40)
