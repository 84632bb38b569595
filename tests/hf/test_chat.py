"""Conversations through chat templates: which tokens the assistant wrote."""

from __future__ import annotations

import pytest

from longrnn.errors import UserError
from longrnn.hf.tokenizer import HFTokenizer, byte_level
from longrnn.text import ByteTokenizer

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
    assert len(ids) == len(scored)
    found, current = [], []
    for token, is_answer in zip([*ids, 0], [*scored, False], strict=True):
        if is_answer:
            current.append(token)
        elif current:
            found.append(tokenizer.decode(current))
            current = []
    return found


def test_the_tokens_of_the_assistant() -> None:
    """Answers and their ends are found."""
    assert answers(MARKED, MESSAGES) == ["hello you</s>", "no</s>"]
    assert answers(MARKED, MESSAGES[:2]) == []


def test_what_has_no_template() -> None:
    """Templates that are missing or mark no answers, and conversations that one refuses."""
    with pytest.raises(UserError, match="chat_template.jinja"):
        chat_tokenizer(None).encode_chat(MESSAGES)
    with pytest.raises(UserError, match="template"):
        ByteTokenizer().encode_chat(MESSAGES)
    with pytest.raises(UserError, match="endgeneration"):
        chat_tokenizer(TURN).encode_chat(MESSAGES)
    refusing = "{% generation %}{{ raise_exception('roles must alternate') }}{% endgeneration %}"
    with pytest.raises(ValueError, match="refuses it, roles must alternate"):
        chat_tokenizer(refusing).encode_chat(MESSAGES)
