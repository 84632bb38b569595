"""Text generation with any language model that has an explicit state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import index
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.models.base import LanguageModel
from longrnn.models.checks import check_tokens
from longrnn.models.finite import explain_nonfinite
from longrnn.ops.rows import Rows
from longrnn.state import LMState, reset, take

# Returned in place of a token, so that the check needs no synchronisation of its own.
NOT_FINITE = -1


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
    stop: Sequence[Sequence[int]] = (),
    generator: torch.Generator | None = None,
    rows: Rows | None = None,
) -> Generation:
    """Continues each row of a prompt.

    Args:
        model: any `LanguageModel`.
        prompt: `(b, t)` int64, t >= 1.
        state: the state before the prompt; it is not changed, so several calls may share it.
        max_new_tokens: the maximum number per row.
        temperature: 0 takes the most likely token; otherwise logits are divided by it and sampled.
        top_p: sample among the fewest tokens whose probabilities reach this sum.
        stop: sequences of ids; a row ends after the first one that it generates.
        generator: source of randomness, on the model's device.
        rows: where padding stands in the prompt, and documents begin; None for no padding. Each row
            gives what it gives alone.

    Raises:
        UserError: an empty prompt, options out of range, logits that are not finite, or padding for
            a model that cannot read it.
    """
    run = _Run(model, prompt, state, max_new_tokens, temperature, top_p, generator, rows)
    stops = _stops(stop)
    if stops:
        tokens = list(run.rows(stops))[-1]
    else:
        # Nothing depends on the tokens, so that the host reads them once, at the end.
        tokens = run.read([run.advance(None) for _ in range(max_new_tokens)])
    return Generation(tokens, run.state)


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
    rows: Rows | None = None,
) -> Iterator[list[list[int]]]:
    """Like `generate`, but yields the ids of each row so far, before the first and after every one.

    These are the same lists each time, which grow.
    """
    run = _Run(model, prompt, state, max_new_tokens, temperature, top_p, generator, rows)
    yield from run.rows(_stops(stop))


class _Run:
    """One continuation of a prompt, token by token, without reading tokens from the device.

    Args:
        model: see `generate`, as the other arguments.

    Raises:
        UserError: see `generate`.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: Tensor,
        state: LMState | None,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        generator: torch.Generator | None,
        rows: Rows | None,
    ) -> None:
        prompt = check_tokens(prompt, model.vocab_size, rows)
        if prompt.shape[1] == 0:
            raise UserError("the prompt is empty: give at least one token")
        if rows is not None:
            if not bool(rows.count.all()):
                row = int((rows.count == 0).nonzero()[0])
                raise UserError(
                    f"row {row} of the prompt is all padding: give at least one token per row"
                )
            prompt, rows = rows.left_padded(prompt)
        if max_new_tokens < 0 or not 0 <= temperature < float("inf") or not 0 < top_p <= 1:
            raise UserError(
                "max_new_tokens and temperature must be 0 or more and finite, and top_p in (0, 1]: "
                f"give such numbers, not {max_new_tokens}, {temperature} and {top_p}"
            )
        self._model, self._prompt, self._before, self._rows = model, prompt, state, rows
        self._max_new_tokens = max_new_tokens
        self._choose = partial(_choose, temperature=temperature, top_p=top_p, generator=generator)
        given = {} if rows is None else {"rows": rows}  # a Hugging Face model takes no rows
        logits, self.state = model(prompt, state, keep=1, **given)
        self._logits, self._after_prompt = logits[:, -1], self.state

    def advance(self, done: Tensor | None) -> Tensor:
        """Chooses and consumes the next token of each row.

        Args:
            done: `(b,)` bool, rows that keep their state; None for none.

        Returns:
            The tokens, `(b,)`; NOT_FINITE where a logit is not finite.
        """
        token = self._choose(self._logits)
        before = self.state
        if done is not None:
            # The next position of a row that is done may be past the end of a table of positions.
            before = before._replace(position=before.position.masked_fill(done, 0))
        logits, after = self._model(token.clamp(min=0)[:, None], before, keep=1)
        self.state = after if done is None else reset(after, self.state, done)
        self._logits = logits[:, -1]
        return token

    def rows(self, stops: list[list[int]]) -> Iterator[list[list[int]]]:
        """See `stream`."""
        rows: list[list[int]] = [[] for _ in range(len(self._prompt))]
        done = [False] * len(rows)
        yield rows
        columns: list[Tensor] = []
        mask: Tensor | None = None
        for _ in range(self._max_new_tokens):
            columns.append(self.advance(mask))
            before = list(done)
            for row, (value,) in enumerate(self.read(columns, last=True)):
                if not done[row]:
                    rows[row].append(value)
                    done[row] = any(rows[row][-len(end) :] == end for end in stops)
            yield rows
            if all(done):
                break
            if done != before:
                mask = torch.tensor(done, device=self._prompt.device)

    def read(self, columns: list[Tensor], *, last: bool = False) -> list[list[int]]:
        """The ids of each row from the tokens of each step, or those of the last step only.

        Raises:
            UserError: logits were not finite.
        """
        if not columns:
            return [[] for _ in range(len(self._prompt))]
        rows = torch.stack(columns[-1:] if last else columns, dim=1).tolist()
        for row, ids in enumerate(rows):
            if NOT_FINITE in ids:
                self._refuse(row, columns[: len(columns) - len(ids) + ids.index(NOT_FINITE)])
        return rows

    def _refuse(self, row: int, columns: list[Tensor]) -> NoReturn:
        """Explains the logits after the tokens of the given steps, of which a row's are bad."""
        if columns:
            tokens = torch.stack(columns, dim=1)[row : row + 1]
            explain_nonfinite(self._model, tokens, take(self._after_prompt, [row]))
        tokens, before = self._prompt[row : row + 1], self._before
        if self._rows is not None:
            tokens = self._rows.arrange(self._prompt)[row : row + 1, : int(self._rows.count[row])]
        explain_nonfinite(self._model, tokens, None if before is None else take(before, [row]))


def _stops(stop: Sequence[Sequence[int]]) -> list[list[int]]:
    """The stop sequences as lists of ids, without empty ones."""
    try:
        return [[index(token) for token in sequence] for sequence in stop if len(sequence)]
    except TypeError as error:
        raise UserError(
            f"stop must be sequences of token ids, not {stop!r}: give for example [[3], [5, 7]]"
        ) from error


def _choose(
    logits: Tensor, *, temperature: float, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """One token per row, `(b,)`, from logits `(b, v)`; NOT_FINITE where a logit is not finite."""
    finite = logits.isfinite().all(-1)
    if temperature == 0:
        return torch.where(finite, logits.argmax(-1), NOT_FINITE)
    # Sampling from NaN would abort the process on CUDA.
    logits = torch.where(finite[:, None], logits, 0.0).float()
    # Subtracting the maximum avoids 0/0 and inf − inf at very small temperatures.
    scaled = ((logits - logits.max(-1, keepdim=True).values).double() / temperature).float()
    probabilities = torch.softmax(scaled, dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        # The most likely token always stays, because the sum before it is 0.
        ordered = ordered.where(ordered.cumsum(-1) - ordered < top_p, 0.0)
        probabilities = torch.zeros_like(ordered).scatter(-1, order, ordered)
    sampled = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    return torch.where(finite, sampled, NOT_FINITE)
