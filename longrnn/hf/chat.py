"""Conversations as token ids, through the chat template of a tokenizer, and who wrote which token.

Where the template marks what the assistant generates (`{% generation %}`), transformers tells
which tokens these are. Otherwise the conversation is rendered up to each answer, without and with
it: what the answer adds are its tokens, which includes the template's own end of a turn. This needs
a template that renders the beginning of a conversation as the beginning of the rendered whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from longrnn.errors import UserError
from longrnn.files import one_line
from longrnn.hf.tokenizer import HFTokenizer
from longrnn.text import Tokenizer

GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
ANSWERING = "assistant"


class Chat:
    """The chat template of a tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer with a template.

    Raises:
        UserError: there is no template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer, HFTokenizer):
            raise UserError(
                "a tokenizer of bytes has no chat template: give prompt and completion instead of "
                "messages, or the tokenizer of a chat model"
            )
        self._tokenizer = tokenizer
        self._inner: Any = tokenizer.tokenizer
        try:
            template = self._inner.get_chat_template()
        except ValueError as error:
            raise UserError(
                "the tokenizer has no chat template: put a chat_template.jinja beside its "
                "tokenizer.json, or give prompt and completion instead of messages"
            ) from error
        self._is_marked = GENERATION.search(template) is not None

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and which of them the assistant wrote.

        Args:
            messages: `{"role": …, "content": …}`, the first one first.

        Raises:
            ValueError: the template refuses the conversation, or renders its beginning differently;
                the message says why.
        """
        if self._is_marked:
            options = {"return_dict": True, "return_assistant_tokens_mask": True}
            found = self._applied(messages, tokenize=True, **options)
            return list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]
        whole = self._rendered(messages)
        scored = [False] * len(whole)
        for index, message in enumerate(messages):
            if message.get("role") != ANSWERING:
                continue
            before = self._rendered(messages[:index], add_generation_prompt=True)
            after = self._rendered(messages[: index + 1])
            if after[: len(before)] != before or whole[: len(after)] != after:
                raise ValueError(
                    f"the chat template renders the conversation up to message {index + 1} "
                    "differently within the whole conversation, so the tokens of that answer are "
                    "not known; mark answers with {% generation %} in the template, or end the "
                    "conversation there"
                )
            scored[len(before) : len(after)] = [True] * (len(after) - len(before))
        return whole, scored

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> list[int]:
        text = self._applied(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        return self._tokenizer.encode(text)

    def _applied(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        try:
            return self._inner.apply_chat_template([dict(m) for m in messages], **options)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"its chat template refuses it, {one_line(error)}") from error
