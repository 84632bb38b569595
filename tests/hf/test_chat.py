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
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# As of models that think: what earlier answers hold depends on whether a later message exists.
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if loop.last and m.role == 'assistant' %}(thinking) {% endif %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
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


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_the_tokens_of_the_assistant(template: str) -> None:
    """Answers and their ends are found, whether the template marks them or not."""
    assert answers(template, MESSAGES) == ["hello you</s>", "no</s>"]
    assert answers(template, MESSAGES[:2]) == []
    one, other = (chat_tokenizer(t).encode_chat(MESSAGES) for t in (MARKED, PLAIN))
    assert one == other


def test_a_template_that_changes_what_was_said_is_refused() -> None:
    """Without marks, a template that renders earlier answers differently is refused."""
    assert answers(FORGETFUL, MESSAGES[1:3]) == ["(thinking) hello you</s>"]
    with pytest.raises(ValueError, match="up to message 3 differently.*generation"):
        chat_tokenizer(FORGETFUL).encode_chat(MESSAGES)


def test_what_has_no_template() -> None:
    """Tokenizers without a template, and conversations that it refuses, are named."""
    with pytest.raises(UserError, match="chat_template.jinja"):
        chat_tokenizer(None).encode_chat(MESSAGES)
    with pytest.raises(UserError, match="template"):
        ByteTokenizer().encode_chat(MESSAGES)
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="refuses it, roles must alternate"):
        chat_tokenizer(refusing).encode_chat(MESSAGES)
