"""Makes documents of prompts and answers, whose answers alone are trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from longrnn.errors import UserError
from longrnn.hf.chat import Chat
from longrnn.text import Tokenizer
from longrnn.training.documents import Part, end_of_sequence
from longrnn.training.origins import Origin

PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"


class InstructReader:
    """Makes one document of each row of a table.

    A row has a `prompt` and a `completion`, both texts, or `messages`, a list of
    `{"role": …, "content": …}`. Prompt and completion are tokenized separately, as they are when a
    model answers a prompt. Messages go through the chat template of the tokenizer.

    Args:
        tokenizer: makes the ids.
        append_eos: whether a completion ends with the tokenizer's end-of-sequence token, which the
            model then learns to write. A chat template has its own end of an answer.

    Raises:
        UserError: `append_eos` and a tokenizer without such a token.
    """

    scored = True

    def __init__(self, tokenizer: Tokenizer, *, append_eos: bool = True) -> None:
        self.tokenizer, self.append_eos = tokenizer, append_eos
        self._chat: Chat | None = None
        self._row = 0

    def items(self, origin: Origin, skip: int) -> Iterator[Mapping[str, Any]]:
        self._row = skip
        return origin.rows(skip)

    def parts(self, origin: Origin, item: Mapping[str, Any]) -> Iterator[Part]:
        self._row += 1
        ids, scored = self._encoded(item, f"{origin.name}, row {self._row},")
        size = sum(len(str(value)) for value in item.values())
        yield Part(ids, True, scored, size, is_kept=any(scored[1:]))

    def options(self) -> Mapping[str, Any]:
        # The fingerprint of a tokenizer does not cover its template.
        inner = getattr(self.tokenizer, "tokenizer", None)
        return {"eos": self.append_eos, "template": getattr(inner, "chat_template", None)}

    def _encoded(self, row: Mapping[str, Any], where: str) -> tuple[list[int], list[bool]]:
        messages = row.get(MESSAGES)
        if messages is not None:
            return self._conversation(messages, where)
        prompt, completion = row.get(PROMPT), row.get(COMPLETION)
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            raise UserError(
                f"{where} has neither the texts prompt and completion nor messages, but "
                f"{', '.join(row) or 'nothing'}: rename its columns"
            )
        question, answer = self.tokenizer.encode(prompt), self.tokenizer.encode(completion)
        if answer and self.append_eos:
            answer = [*answer, *end_of_sequence(self.tokenizer)]
        return question + answer, [False] * len(question) + [True] * len(answer)

    def _conversation(self, messages: Any, where: str) -> tuple[list[int], list[bool]]:
        listed = isinstance(messages, list) and all(isinstance(m, Mapping) for m in messages)
        if not listed or not all({"role", "content"} <= m.keys() for m in messages):
            raise UserError(
                f"{where} has messages that are not a list of mappings with role and content: "
                "write it so"
            )
        self._chat = self._chat or Chat(self.tokenizer)
        try:
            return self._chat.encode(messages)
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{where} cannot be used ({error}): correct the template or leave the row out"
            ) from error
