"""Text generation with any language model that has an explicit state."""

from collections.abc import Callable, Sequence
from math import isfinite
from operator import index
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.models.base import LanguageModel, check_tokens
from longrnn.models.finite import explain_nonfinite
from longrnn.state import LMState, join, take

# What ends a row: sequences of ids, or a function of the row's number and its ids.
Stop: TypeAlias = Sequence[Sequence[int]] | Callable[[int, list[int]], bool]


class Generation(NamedTuple):
    """What `generate` returns.

    Attributes:
        tokens: one list of ids per row, without the prompt, with the stop sequence.
        state: after all returned tokens of each row.
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
    stop: Stop = (),
    generator: torch.Generator | None = None,
) -> Generation:
    """Continues each row of a prompt.

    Args:
        model: any `LanguageModel`.
        prompt: `(b, t)` int64, t >= 1.
        state: the state before the prompt; it is not changed, so several calls may share it.
        max_new_tokens: the maximum number per row.
        temperature: 0 takes the most likely token; otherwise logits are divided by it and sampled.
        top_p: sample among the fewest tokens whose probabilities reach this sum.
        stop: sequences of ids, of which the first that a row generates ends it; or a function of
            the number of a row and its ids, called after each token, that says whether it ends.
        generator: source of randomness, on the model's device.

    Raises:
        UserError: an empty prompt, options out of range, or logits that are not finite.
    """
    prompt = check_tokens(prompt, model.vocab_size)
    if prompt.shape[1] == 0:
        raise UserError("the prompt has no token: give at least one token per row")
    if max_new_tokens < 0 or not 0 <= temperature < float("inf") or not 0 < top_p <= 1:
        raise UserError(
            "max_new_tokens and temperature must be 0 or more and finite, and top_p in (0, 1]: "
            f"give such numbers, not {max_new_tokens}, {temperature} and {top_p}"
        )
    ends = ends_of(stop)
    logits, after = model(prompt, state, keep=1)
    ids: list[list[int]] = [[] for _ in prompt]
    # The numbers of the rows that go on, and the final states of the others.
    active, ended = list(range(len(prompt))), dict[int, LMState]()
    for _ in range(max_new_tokens):
        last = logits[:, -1]
        # A sum is not finite if a logit is not, and takes less time than a look at each of them.
        if not isfinite(last.sum(dtype=torch.double)):
            read = torch.cat([prompt[active], prompt.new_tensor([ids[row] for row in active])], 1)
            explain_nonfinite(model, read, None if state is None else take(state, active))
        tokens = _choose(last, temperature=temperature, top_p=top_p, generator=generator)
        logits, after = model(tokens[:, None], after, keep=1)
        for row, token in zip(active, tokens.tolist(), strict=True):
            ids[row].append(token)
        going = [place for place, row in enumerate(active) if not ends(row, ids[row])]
        if len(going) < len(active):
            gone = set(range(len(active))) - set(going)
            ended |= {active[place]: take(after, [place]) for place in gone}
            active = [active[place] for place in going]
            if not active:
                break
            after, logits = take(after, going), logits[going]
    if ended:
        ended |= {row: take(after, [place]) for place, row in enumerate(active)}
        after = join([ended[row] for row in range(len(prompt))])
    return Generation(ids, after)


def ends_of(stop: Stop) -> Callable[[int, list[int]], bool]:
    """The function that says whether a row ends."""
    if callable(stop):
        return stop
    try:
        stops = [[index(token) for token in sequence] for sequence in stop if len(sequence)]
    except TypeError as error:
        raise UserError(
            f"stop must be sequences of token ids, not {stop!r}: give for example [[3], [5, 7]]"
        ) from error
    return lambda _, ids: any(ids[-len(end) :] == end for end in stops)


def _choose(
    logits: Tensor, *, temperature: float, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """One token per row, `(b,)`, from finite logits `(b, v)`."""
    if temperature == 0:
        return logits.argmax(-1)
    # Subtracting the maximum avoids inf − inf at very small temperatures.
    below = logits.double() - logits.max(-1, keepdim=True).values
    probabilities = torch.softmax((below / temperature).float(), dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        # The most likely token always stays, because the sum before it is 0.
        ordered = ordered.where(ordered.cumsum(-1) - ordered < top_p, 0.0)
        probabilities = torch.zeros_like(ordered).scatter(-1, order, ordered)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
