"""Effective remembrance: how much a prediction depends on the beginning of its context.

EffRem_T(t) = d(q(·|x[0:T]), q(·|x[t:T])) (arXiv 2507.02782), where d is the total variation between
the predictions of the next token after all T tokens and after the last T − t of them. Near 0 the
first t tokens do not matter; near 1 for a small t, the prediction depends on the first tokens.

Notable choices:
- The shortened context starts from the empty state at position 0, as published. For a model with
  position encodings, the different positions are part of the difference.
- Starts are T − 1, T − 2, T − 4, …, so that the number of tokens that a prediction depends on is
  known within a factor of 2.
- Intervals are over stretches of text.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.errors import UserError
from longrnn.evaluation.base import Batches, Evaluation, Item, Plan, Sample, within
from longrnn.evaluation.options import MemoryOptions
from longrnn.evaluation.texts import begun, cut_windows, read_documents
from longrnn.inference.trie import prefill
from longrnn.intervals import SCORE
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.reporting.tables import Column
from longrnn.results import Result
from longrnn.units import format_length

# Stretches that are read at once.
BATCH = 4


class EffectiveMemory(Evaluation[MemoryOptions]):
    """Effective remembrance, see `MemoryOptions`."""

    across = "last tokens kept"

    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        if self.options.positions[0] < 2:
            raise UserError("a position of 1 has no shorter context: give positions of 2 or more")
        return [self._plan(model) for model in models]

    def _plan(self, model: OpenCheckpoint) -> Plan:
        options = self.options
        documents = read_documents(options.texts, model.tokenizer, model.model)
        windows = []
        for document in documents:
            (of_document,) = cut_windows([document], options.positions[-1:])
            windows += of_document[: options.stretches]
        plan = Plan([], {})
        for position in options.positions:
            reached, reasons = within(model, {position: position}, self._column(position))
            plan.reasons.update(reasons)
            for window in windows if reached else ():
                key = {"text": window.document.sha256[:16], "start": window.ends[0]}
                work = position + sum(kept_tokens(position))
                # Stretches of different tokenizers have different tokens and are not paired.
                name = f"{window.name}/{model.tokenizer.fingerprint()}"
                spec = name, window.tokens()[:position]
                plan.items.append(Item({**key, "position": position}, spec, work=work))
        return plan

    def measure(self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress) -> Batches:
        for batch in self.batched(items, BATCH):
            texts = torch.stack([text for _, text in (item.spec for item in batch)])
            distances = remembrance(model.model, texts, progress, model.tokenizer.bos_id)
            yield [
                (item, {str(kept): float(values[row]) for kept, values in distances.items()})
                for row, item in enumerate(batch)
            ]

    def samples(self, item: Item, result: Result) -> Iterator[Sample]:
        name, text = item.spec
        for kept in kept_tokens(len(text)):
            yield Sample(self._column(len(text)), kept, name, result[str(kept)])

    def _column(self, position: int) -> Column:
        return Column(f"EffRem, T = {format_length(position)}", SCORE, ".3f")


def kept_tokens(position: int) -> list[int]:
    """Return the lengths of the shortened contexts: the powers of 2 below a position."""
    return [2**k for k in range((position - 1).bit_length())]


@torch.no_grad()
def remembrance(
    model: LanguageModel, texts: Tensor, progress: Progress, bos_id: int | None = None
) -> dict[int, Tensor]:
    """Return EffRem after the last token by the number of tokens kept, each `(b,)` float64.

    Args:
        model: any language model.
        texts: `(b, t)` int64, t >= 2.
        progress: counts the tokens.
        bos_id: precedes the tokens of a shortened context.
    """
    length = texts.shape[1]

    def chances(start: int) -> Tensor:
        state = model.init_state(len(texts))
        begins = max(0, start - int(bos_id is not None))
        logits, _ = prefill(model, begun(texts[:, begins:], bos_id), state, progress, items=True)
        return torch.softmax(logits.double(), -1).cpu()

    whole = chances(0)
    return {
        kept: (chances(length - kept) - whole).abs().sum(-1) / 2 for kept in kept_tokens(length)
    }
