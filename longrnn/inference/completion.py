"""Texts that go on from many prompts; what prompts begin with in common is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from longrnn.inference.trie import Ids, read_texts
from longrnn.models import LanguageModel
from longrnn.models.generate import stream
from longrnn.progress import Progress
from longrnn.state import take


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
    """Goes on from prompts, in the order in which they are found.

    Args:
        model: any.
        prompts: of at least one token each.
        decode: ids to text.
        until: texts that end an answer; they are left in it.
        eos: the id that ends an answer, where there is one.
        max_new_tokens: at most so many.
        temperature: 0 takes the likeliest token; above it, torch's global randomness is used.
        top_p: sample among the fewest tokens whose probabilities reach this sum.
        batch_size: rows side by side.
        progress: counts the tokens that are computed.

    Yields:
        The number of a prompt, and the text behind it.
    """
    # The last token is left to `stream`, which wants one.
    asked: dict[Ids, list[int]] = {}
    for number, prompt in enumerate(prompts):
        asked.setdefault(prompt[:-1], []).append(number)
    texts = list(asked)
    for numbers, _, state in read_texts(model, texts, batch_size, progress):
        forks = [(row, i) for row, number in enumerate(numbers) for i in asked[texts[number]]]
        for first in range(0, len(forks), batch_size):
            rows, some = zip(*forks[first : first + batch_size], strict=True)
            last = torch.tensor([prompts[i][-1:] for i in some], device=state.position.device)
            said = [""] * len(some)
            for generation in stream(
                model,
                last,
                take(state, rows),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                stop=[] if eos is None else [[eos]],
            ):
                progress.advance(0, len(some))
                said = [decode(ids) for ids in generation.tokens]
                ended = [
                    eos in ids or any(end in text for end in until if end)
                    for ids, text in zip(generation.tokens, said, strict=True)
                ]
                if all(ended):
                    break
            yield from zip(some, said, strict=True)
