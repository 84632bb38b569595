"""Text generation with any language model that has an explicit state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import index
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.models.base import LanguageModel
from longrnn.models.checks import check_tokens
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
            the number of a row and its ids that says whether the row ends.
        generator: source of randomness, on the model's device.

    Raises:
        UserError: an empty prompt, options out of range, or logits that are not finite.
    """
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "generator": generator}
    run = _Run(model, prompt, state, max_new_tokens=max_new_tokens, **sampling)
    *_, ids = run.rows(_ends(stop))
    return Generation(ids, run.final_state())


@torch.no_grad()
def stream(
    model: LanguageModel,
    prompt: Tensor,
    state: LMState | None = None,
    *,
    stop: Stop = (),
    **options: Any,
) -> Iterator[list[list[int]]]:
    """Like `generate`, but yields the ids of each row so far, before the first and after every one.

    These are the same lists each time, which grow. Options are those of `generate`.
    """
    yield from _Run(model, prompt, state, **options).rows(_ends(stop))


class _Run:
    """One continuation of a prompt, token by token; see `generate`.

    Attributes:
        active: the numbers of the rows that have not ended; only they are computed.
        state: of the active rows, after all their tokens.
        logits: `(b, v)`, likewise.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: Tensor,
        state: LMState | None,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        prompt = check_tokens(prompt, model.vocab_size)
        if prompt.shape[1] == 0:
            raise UserError("the prompt has no token: give at least one token per row")
        if max_new_tokens < 0 or not 0 <= temperature < float("inf") or not 0 < top_p <= 1:
            raise UserError(
                "max_new_tokens and temperature must be 0 or more and finite, and top_p in (0, 1]: "
                f"give such numbers, not {max_new_tokens}, {temperature} and {top_p}"
            )
        self._model, self._prompt, self._before = model, prompt, state
        self._max_new_tokens = max_new_tokens
        self._choose = partial(_choose, temperature=temperature, top_p=top_p, generator=generator)
        self._ended: dict[int, LMState] = {}
        self.active = list(range(len(prompt)))
        logits, self.state = model(prompt, state, keep=1)
        self.logits = logits[:, -1]

    def rows(self, ends: Callable[[int, list[int]], bool]) -> Iterator[list[list[int]]]:
        """See `stream`."""
        rows: list[list[int]] = [[] for _ in self.active]
        yield rows
        for _ in range(self._max_new_tokens):
            for place, is_finite in enumerate(self.logits.isfinite().all(-1).tolist()):
                if not is_finite:
                    self._refuse(self.active[place], rows[self.active[place]])
            tokens = self._choose(self.logits)
            logits, self.state = self._model(tokens[:, None], self.state, keep=1)
            self.logits = logits[:, -1]
            for row, token in zip(self.active, tokens.tolist(), strict=True):
                rows[row].append(token)
            ended = {place for place, row in enumerate(self.active) if ends(row, rows[row])}
            if ended:
                self._ended |= {self.active[place]: take(self.state, [place]) for place in ended}
                places = [place for place in range(len(self.active)) if place not in ended]
                self.active = [self.active[place] for place in places]
                if places:
                    self.state, self.logits = take(self.state, places), self.logits[places]
            yield rows
            if not self.active:
                break

    def final_state(self) -> LMState:
        """The state of all rows, each after its last token."""
        if not self._ended:
            return self.state
        going = {row: take(self.state, [place]) for place, row in enumerate(self.active)}
        states = self._ended | going
        return join([states[row] for row in range(len(states))])

    def _refuse(self, row: int, ids: list[int]) -> NoReturn:
        """Raises the UserError for logits of a row that are not finite after these new ids."""
        prompt = self._prompt[row]
        before = None if self._before is None else take(self._before, [row])
        explain_nonfinite(self._model, torch.cat([prompt, prompt.new_tensor(ids)])[None], before)


def _ends(stop: Stop) -> Callable[[int, list[int]], bool]:
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
