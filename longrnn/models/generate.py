"""Generation from any language model with an explicit state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.models.base import LanguageModel, check_tokens
from longrnn.models.finite import explain_nonfinite
from longrnn.state import LMState, reset

# In the place of a token, so that the check waits for the device no more often than the tokens do.
NOT_FINITE = -1


class Generation(NamedTuple):
    """What `generate` returns.

    Attributes:
        tokens: one list of ids per row, the prompt not included, a stop sequence included.
        state: after every returned token of its row, ready for more.
    """

    tokens: list[list[int]]
    state: LMState


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Tensor,
    state: LMState | None = None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: Sequence[Sequence[int]] = (),
    generator: torch.Generator | None = None,
) -> Generation:
    """Continues each row of a prompt.

    Rows have one length: bucket prompts by length, because padding would enter the state.

    Args:
        model: any `LanguageModel`.
        prompt: `(b, t)` int64, t >= 1.
        state: what came before the prompt; it is not used up, so any number of calls may share it.
        max_new_tokens: at most so many per row.
        temperature: 0 takes the likeliest token; above it, logits are divided by it and sampled.
        top_p: sample among the fewest tokens whose probabilities reach this sum.
        stop: sequences of ids; a row ends behind the first one it completes.
        generator: randomness of the sampling, on the model's device.

    Raises:
        UserError: an empty prompt, settings out of range, or logits that are not finite.
    """
    *_, last = stream(
        model,
        prompt,
        state,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        stop=stop,
        generator=generator,
    )
    return last


@torch.no_grad()
def stream(
    model: LanguageModel,
    prompt: Tensor,
    state: LMState | None = None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: Sequence[Sequence[int]] = (),
    generator: torch.Generator | None = None,
) -> Iterator[Generation]:
    """`generate`, yielding what there is after each token (the first time with no token yet)."""
    prompt = check_tokens(prompt, model.vocab_size)
    if prompt.shape[1] == 0:
        raise UserError("the prompt is empty: give at least one token")
    if max_new_tokens < 0 or not 0 <= temperature < float("inf") or not 0 < top_p <= 1:
        raise UserError(
            "max_new_tokens and temperature must be 0 or more and finite, and top_p in (0, 1]: "
            f"give such numbers, not {max_new_tokens}, {temperature} and {top_p}"
        )
    stops = _stops(stop)
    read, before = prompt, state
    logits, state = model(read, before, keep=1)
    rows: list[list[int]] = [[] for _ in range(len(prompt))]
    done = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    yield Generation([list(row) for row in rows], state)
    for _ in range(max_new_tokens):
        token = _choose(logits[:, -1], temperature, top_p, generator)
        values = token.tolist()
        if NOT_FINITE in values:
            explain_nonfinite(model, read, before)
        read, before = token[:, None], state
        logits, after = model(read, before, keep=1)
        # A row that has stopped stays where it was; where none has, nothing is copied.
        state = reset(after, state, done) if done.any() else after
        for row, (ids, value) in enumerate(zip(rows, values, strict=True)):
            if not done[row]:
                ids.append(value)
                done[row] = any(ids[-len(end) :] == end for end in stops)
        yield Generation([list(row) for row in rows], state)
        if done.all():
            break


def _stops(stop: Sequence[Sequence[int]]) -> list[list[int]]:
    """The sequences of ids that end a row; empty ones end none."""
    try:
        return [[index(token) for token in sequence] for sequence in stop if len(sequence)]
    except TypeError as error:
        raise UserError(
            f"stop takes sequences of token ids, not {stop!r}: give for example [[3], [5, 7]]"
        ) from error


def _choose(
    logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """One token per row, `(b,)`, from logits `(b, v)`; NOT_FINITE where a logit is not finite."""
    finite = logits.isfinite().all(-1)
    if temperature == 0:
        return torch.where(finite, logits.argmax(-1), NOT_FINITE)
    # Sampling from what is not finite would end the process on CUDA.
    logits = torch.where(finite[:, None], logits, 0.0).float()
    # The largest becomes 0, so that no temperature, however small, gives 0/0 or inf − inf.
    scaled = ((logits - logits.max(-1, keepdim=True).values).double() / temperature).float()
    probabilities = torch.softmax(scaled, dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        # The first token always stays: what comes before it sums to zero.
        ordered = ordered.where(ordered.cumsum(-1) - ordered < top_p, 0.0)
        probabilities = torch.zeros_like(ordered).scatter(-1, order, ordered)
    sampled = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    return torch.where(finite, sampled, NOT_FINITE)
