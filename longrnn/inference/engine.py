"""Completions, scores and losses; what texts share is read once (see `trie`).

Forks of one state are used for all continuations of a context. The calls of the model differ from
those for each text alone; the results are equal up to rounding.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.inference import trie
from longrnn.inference.trie import Ids, prefill, read_texts
from longrnn.models import LanguageModel, generate
from longrnn.models.base import MAX_LOGITS
from longrnn.models.finite import refuse_nonfinite
from longrnn.progress import Progress
from longrnn.state import LMState, take

# Ids that are decoded in front of those that may be the end of a completion.
CONTEXT = 8


class Pair(NamedTuple):
    """A continuation to score, and the context before it (at least one token)."""

    context: Ids
    continuation: Ids


class Score(NamedTuple):
    """`nats`: log-likelihood of a continuation; `greedy`: whether greedy decoding generates it."""

    nats: float
    greedy: bool


@torch.no_grad()
def complete(
    model: LanguageModel,
    prompts: Iterable[Ids | Tensor],
    *,
    decode: Callable[[Sequence[int]], str],
    max_new_tokens: int,
    batch_size: int,
    progress: Progress,
    until: Sequence[str] = (),
    eos: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> Iterator[tuple[int, str]]:
    """Generates completions of prompts.

    Args:
        model: any language model.
        prompts: token ids, at least one per prompt.
        decode: maps ids to text.
        max_new_tokens: the maximum number per prompt.
        batch_size: rows per batch.
        progress: counts the tokens that are computed.
        until: texts that end a completion; they remain at its end.
        eos: the id that ends a completion, if there is one.
        temperature: 0 takes the most likely token; otherwise torch's global generator is used.
        top_p: sample among the fewest tokens whose probabilities reach this sum.

    Yields:
        The index of a prompt and its completion, in the order in which they are computed.
    """
    ends = [end for end in until if end]
    width = max((len(end.encode()) for end in ends), default=0) + CONTEXT

    def ended(_: int, ids: list[int]) -> bool:
        progress.advance(0, 1)
        # The last ids alone are decoded, so that a long completion takes no longer per token. An id
        # stands for a byte or more; the first ones may read differently on their own.
        last = decode(ids[-width:]) if ends else ""
        if any(end in last for end in ends):
            text = decode(ids)
            return any(end in text for end in ends)
        return ids[-1] == eos

    last_ids: list[int] = []  # for `generate`, which needs at least one token

    def contexts() -> Iterator[Ids | Tensor]:
        for prompt in prompts:
            last_ids.append(int(prompt[-1]))
            yield prompt[:-1]

    for numbers, _, state in read_texts(model, contexts(), batch_size, progress, keep=0):
        last = torch.tensor([[last_ids[i]] for i in numbers], device=state.position.device)
        generated = generate(
            model,
            last,
            state,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            stop=ended,
        )
        yield from zip(numbers, map(decode, generated.tokens), strict=True)


@torch.no_grad()
def token_losses(
    model: LanguageModel, windows: Tensor, state: LMState | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Computes the loss of every token after the first, in parts.

    Args:
        model: reads the windows.
        windows: `(b, t + 1)` token ids; the last is only predicted.
        state: before the windows; the initial state if None.

    Yields:
        The position where a part begins, and its losses in nats, `(b, t)` float64 on the CPU: the
        loss at position i is that of token i + 1.

    Raises:
        UserError: logits that are not finite.
    """
    batch, length = len(windows), windows.shape[1] - 1
    before = state = model.init_state(batch) if state is None else state
    for start in range(0, length, trie.SCORED_TOKENS):
        part = windows[:, start : start + trie.SCORED_TOKENS + 1].to(state.position.device)
        nats, state = model.token_losses(part[:, :-1], part[:, 1:], state)
        nats = nats.double().cpu()
        refuse_nonfinite(nats, model, windows[:, : start + part.shape[1] - 1], before)
        yield start, nats


@torch.no_grad()
def overlapping_losses(
    model: LanguageModel,
    tokens: Tensor,
    progress: Progress,
    *,
    context: int,
    stride: int,
    rows: int = 1,
    bos_id: int | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Computes the loss of every token after the first in overlapping windows, in parts.

    The usual protocol for models without a carried state, as in the guide "Perplexity of
    fixed-length models" of Hugging Face transformers. A text is read in windows of `context`
    tokens, each `stride` tokens after the previous one and each from the initial state. The first
    window scores all of its tokens and every later window its last `stride`, so that each token is
    scored once, with at least `context - stride` tokens before it. The last window is shorter where
    the text ends inside it.

    Args:
        model: reads every window from the initial state.
        tokens: `(b, t + 1)` token ids; the last is only predicted.
        progress: counts the scored tokens as steps, and the tokens that are read as units.
        context: tokens that a window reads.
        stride: tokens between the starts of two windows, from 1 to the context.
        rows: windows in one batch, of all texts together; at least one window of each text.
        bos_id: is read in place of the first token of every window.

    Yields:
        The position where a part begins, and its losses in nats, `(b, t)` float64 on the CPU: the
        loss at position i is that of token i + 1.

    Raises:
        UserError: logits are not finite.
    """
    texts, length = len(tokens), tokens.shape[1] - 1
    # Windows after the first that end inside the text, and the tokens that a last one scores.
    whole = max(0, (length - context) // stride)
    rest, together = length - context - whole * stride, max(1, rows // texts)
    groups = [(0, 1, min(context, length))]
    groups += [(n, min(together, whole + 1 - n), stride) for n in range(1, whole + 1, together)]
    groups += [(whole + 1, 1, rest)] if rest > 0 else []
    for number, count, scored in groups:
        begin = number * stride
        size = min(context, length - begin)
        part = tokens[:, begin : begin + (count - 1) * stride + size + 1]
        windows, before = part.unfold(1, size + 1, stride).flatten(0, 1), size - scored
        if bos_id is not None:
            windows = windows.index_fill(1, torch.tensor(0, device=windows.device), bos_id)
        initial = model.init_state(len(windows))
        _, state = prefill(model, windows[:, :before], initial, progress, keep=0)
        for start, nats in token_losses(model, windows[:, before:], state):
            progress.advance(nats.numel(), nats.numel())
            by_text = nats.view(texts, count, -1)
            for which in range(count):
                yield begin + before + which * stride + start, by_text[:, which]


@torch.no_grad()
def score(
    model: LanguageModel, pairs: Sequence[Pair], *, batch_size: int, progress: Progress
) -> Iterator[tuple[int, Score]]:
    """Scores continuations. Logits are computed for their tokens only, in parts.

    Args:
        model: any language model.
        pairs: contexts and continuations; equal contexts are read once.
        batch_size: rows per batch.
        progress: counts the pairs and the tokens that are computed.

    Yields:
        The index of a pair and its score, in the order in which they are computed.
    """
    contexts = [pair.context for pair in pairs]
    for numbers, logits, state in read_texts(model, contexts, batch_size, progress):
        device, continuations = state.position.device, [pairs[i].continuation for i in numbers]
        # Continuations of one length together.
        for size in dict.fromkeys(map(len, continuations)):
            rows = [row for row, ids in enumerate(continuations) if len(ids) == size]
            ids = torch.tensor([continuations[row] for row in rows], device=device)
            nats, greedy = _compare(logits[rows, None], ids[:, :1])
            after = take(state, rows)
            width = min(trie.SCORED_TOKENS, max(1, MAX_LOGITS // (len(rows) * model.vocab_size)))
            for start in range(0, size - 1, width):
                before, part = after, ids[:, start : min(start + width, size - 1)]
                predicted, after = model(part, before)
                loss, best = _compare(predicted, ids[:, start + 1 : start + 1 + part.shape[1]])
                refuse_nonfinite(loss, model, part, before)
                nats, greedy = nats + loss, greedy & best
                progress.advance(0, part.numel())
            progress.advance(len(rows), 0)
            scores = map(Score, (-nats).tolist(), greedy.tolist())
            yield from zip([numbers[row] for row in rows], scores, strict=True)


def _compare(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each row in nats, `(b,)`, and whether all its targets are most likely, `(b,)`."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(wide.flatten(0, 1), target.flatten(), reduction="none")
    best = (wide.argmax(-1) == target).all(1)
    return loss.view(target.shape).double().sum(1).cpu(), best.cpu()
