"""Completes many prompts; beginnings that prompts share are read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from longrnn.inference.trie import Ids, read_texts
from longrnn.models import LanguageModel
from longrnn.models.generate import stream
from longrnn.progress import Progress
from longrnn.state import take

# Ids that are decoded in front of those that may be the end of a completion.
CONTEXT = 8


@torch.no_grad()
def complete(
    model: LanguageModel,
    prompts: Sequence[Ids],
    *,
    decode: Callable[[Sequence[int]], str],
    until: Sequence[str],
    eos: int | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    batch_size: int,
    progress: Progress,
) -> Iterator[tuple[int, str]]:
    """Generates completions of prompts.

    Args:
        model: any language model.
        prompts: token ids, at least one per prompt.
        decode: maps ids to text.
        until: texts that end a completion; they remain at its end.
        eos: the id that ends a completion, if there is one.
        max_new_tokens: the maximum number per prompt.
        temperature: 0 takes the most likely token; otherwise torch's global generator is used.
        top_p: sample among the fewest tokens whose probabilities reach this sum.
        batch_size: rows per batch.
        progress: counts the tokens that are computed.

    Yields:
        The index of a prompt and its completion, in the order in which they are computed.
    """
    # `stream` gets the last token, because it needs at least one.
    prompts_of: dict[Ids, list[int]] = {}
    for number, prompt in enumerate(prompts):
        prompts_of.setdefault(prompt[:-1], []).append(number)
    texts = list(prompts_of)
    for numbers, _, state in read_texts(model, texts, batch_size, progress):
        forks = [(row, i) for row, number in enumerate(numbers) for i in prompts_of[texts[number]]]
        for first in range(0, len(forks), batch_size):
            rows, some = zip(*forks[first : first + batch_size], strict=True)
            last = torch.tensor([prompts[i][-1:] for i in some], device=state.position.device)
            generated: list[list[int]] = []
            ended = [False] * len(some)
            for generated in stream(
                model,
                last,
                take(state, rows),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                stop=[] if eos is None else [[eos]],
            ):
                progress.advance(0, len(some))
                ended = [
                    done or ids[-1:] == [eos] or _has_end(ids, until, decode)
                    for done, ids in zip(ended, generated, strict=True)
                ]
                if all(ended):
                    break
            yield from zip(some, map(decode, generated), strict=True)


def _has_end(
    ids: Sequence[int], until: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> bool:
    """Whether the text of the ids has one of the texts that end it, which the last id completes.

    The last ids alone are decoded for this, so that a long completion takes no longer per token.
    """
    ends = [end for end in until if end]
    if not ends:
        return False
    # An id stands for a byte or more; the first ones may read differently on their own.
    last = decode(ids[-max(len(end.encode()) for end in ends) - CONTEXT :])
    if not any(end in last for end in ends):
        return False
    text = decode(ids)
    return any(end in text for end in ends)
