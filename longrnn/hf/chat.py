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

from transformers import PreTrainedTokenizerBase

from longrnn.errors import UserError
from longrnn.files import one_line

GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]
) -> tuple[list[int], list[bool]]:
    """The ids of a conversation, and which of them the assistant wrote.

    Args:
        tokenizer: with a chat template.
        messages: `{"role": …, "content": …}`, the first one first.

    Raises:
        UserError: there is no template.
        ValueError: the template refuses the conversation, or renders its beginning differently;
            the message says why.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError(
            "the tokenizer has no chat template: put a chat_template.jinja beside its "
            "tokenizer.json, or give prompt and completion instead of messages"
        ) from error

    def apply(part: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        try:
            return tokenizer.apply_chat_template([dict(one) for one in part], **options)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"its chat template refuses it, {one_line(error)}") from error

    def ids(part: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        text = apply(part, tokenize=False, **options)
        return tokenizer.encode(text, add_special_tokens=False)

    if GENERATION.search(template):
        found = apply(messages, return_dict=True, return_assistant_tokens_mask=True)
        return list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]
    whole = ids(messages)
    scored = [False] * len(whole)
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = ids(messages[:index], add_generation_prompt=True)
        after = ids(messages[: index + 1])
        if after[: len(before)] != before or whole[: len(after)] != after:
            raise ValueError(
                f"the chat template renders the conversation up to message {index + 1} "
                "differently within the whole conversation, so the tokens of that answer are not "
                "known; mark answers with {% generation %} in the template, or end the "
                "conversation there"
            )
        scored[len(before) : len(after)] = [True] * (len(after) - len(before))
    return whole, scored
