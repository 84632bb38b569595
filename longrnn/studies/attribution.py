"""Attribution of the gradient to rare and frequent tokens, by the rows of the embedding.

ArXiv 2402.00236 attributes the instability of training with a large vocabulary to rare tokens. For
one sequence with loss l, row v of the embedding E has the gradient ∂l/∂E_v, the sum of the
gradients at all places where the sequence has token v. The attribution to a class of tokens is

    Σ_{v in the class} ‖∂l/∂E_v‖²

for each sequence, with the loss of training. The query token belongs to no class. A gradient
that reaches E through a tied head is not counted: only what a token does as an input.

Classes are those of the task (`SequenceTask.frequency_classes`). For texts, the rare tokens are the
least frequent ones of the drawn rows that together have at most RARE_SHARE of their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longrnn.data import Batch, SequenceTask, Task
from longrnn.errors import UserError
from longrnn.hf.loading import load_recurrent
from longrnn.intervals import Estimate, mean
from longrnn.models.recurrent import RecurrentLM
from longrnn.progress import Progress
from longrnn.training import checkpoint
from longrnn.training.objective import Objective
from longrnn.units import check_count

# Share of the tokens of a text that are rare, as in `reverse_dual_frequency`.
RARE_SHARE = 0.125
# Sequences of one backward pass, which limits memory.
ROWS = 64
SEQUENCES = 1024


class Attribution(NamedTuple):
    """Sums of squared gradients of n sequences, and how many rows of the embedding they have.

    Attributes:
        squares: `(k, n)` float64, for each of k classes.
        tokens: `(k, n)`, number of different tokens of the class in the sequence.
    """

    squares: Tensor
    tokens: Tensor


class AttributionRow(NamedTuple):
    """Means over sequences with intervals, for one checkpoint.

    Attributes:
        step: optimizer steps before the checkpoint.
        rare: sum of squared gradients at the rows of rare tokens.
        frequent: the same for frequent tokens.
        rare_share: the share of `rare` in both, of each sequence.
        per_rare_token: mean squared gradient of a rare token's row, over the sequences with one.
        per_frequent_token: the same for frequent tokens.
    """

    step: int
    rare: Estimate
    frequent: Estimate
    rare_share: Estimate
    per_rare_token: Estimate
    per_frequent_token: Estimate


def classes_of(task: Task, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return which ids are rare and which are frequent, `(v,)` bool each.

    Args:
        task: the task.
        tokens: ids that were drawn from it, of any shape; the classes of a text follow from them.

    Raises:
        UserError: the task draws all of its tokens equally often.
    """
    rare, frequent = torch.zeros(2, task.vocab_size, dtype=torch.bool).unbind()
    if not isinstance(task, SequenceTask):
        counts = tokens.flatten().bincount(minlength=task.vocab_size)
        order = counts.argsort(stable=True)
        below = counts[order].cumsum(0) <= RARE_SHARE * tokens.numel()
        rare[order] = below
        return rare & (counts > 0), ~rare & (counts > 0)
    found = task.frequency_classes()
    if not found:
        raise UserError(
            "this task draws all tokens equally often, so none is rare: give a run on "
            "reverse_dual_frequency or on a text"
        )
    rare[found["rare"]], frequent[found["frequent"]] = True, True
    return rare, frequent


def attribution(model: RecurrentLM, batch: Batch, classes: Sequence[Tensor]) -> Attribution:
    """Return the sums of squared gradients at the embedding rows of each class, by sequence.

    Args:
        model: any cell, any number of layers.
        batch: sequences with their targets, as in training.
        classes: for each class which ids belong to it, `(v,)` bool.
    """
    device = model.embedding.weight.device
    masks = torch.stack(list(classes)).to(device)
    parts = []
    for start in range(0, len(batch.tokens), ROWS):
        part = batch.row(*range(start, min(start + ROWS, len(batch.tokens)))).to(device)
        parts.append(_attribution(model, part, masks))
    squares, tokens = (torch.cat(field, dim=1).cpu() for field in zip(*parts, strict=True))
    return Attribution(squares, tokens)


def _attribution(model: RecurrentLM, batch: Batch, masks: Tensor) -> tuple[Tensor, Tensor]:
    rows = len(batch.tokens)
    with _embedded(model.embedding) as seen:
        output = Objective(model)([batch], model.init_state(rows))
    # The loss is a mean over rows, which are independent: times `rows`, it is the sum of theirs.
    gradients = torch.autograd.grad(output.loss * rows, [vectors for _, vectors in seen])
    gradient = torch.cat(gradients, dim=1).double()
    tokens = torch.cat([ids for ids, _ in seen], dim=1)
    same = tokens[:, :, None] == tokens[:, None, :]
    # ‖Σ g_i‖² over the places of a token is Σ_ij g_i · g_j: no (v, d) gradient for each sequence.
    at_places = (gradient @ gradient.mT * same).sum(2)
    member = masks[:, tokens]
    squares = (member * at_places).sum(2)
    return squares, (member / same.sum(2)).sum(2).round().long()


@contextmanager
def _embedded(embedding: nn.Embedding) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record ids and vectors, `(b, t)` and `(b, t, d)`, of every call within this context."""
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], vectors: Tensor) -> None:
        seen.append((args[0], vectors))

    handle = embedding.register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def along_checkpoints(
    run: Path,
    task: Task,
    *,
    length: int,
    n: int = SEQUENCES,
    seed: int = 0,
    device: str = "cpu",
    quiet: bool = False,
) -> list[AttributionRow]:
    """Measure all checkpoints of a run on the same sequences.

    Args:
        run: the output folder of the run.
        task: the task it was trained on; the sequences are drawn as in training.
        length: length of the sequences.
        n: number of sequences.
        seed: seed of the sequences.
        device: device of the model.
        quiet: show no progress.

    Raises:
        UserError: the run has no checkpoints, n is below 2, fewer than two sequences have a rare
            or a frequent token, or as `classes_of`.
    """
    check_count("n", n, at_least=2)  # for an interval
    folders = checkpoint.checkpoints(run)
    if not folders:
        raise UserError(f"{run} has no checkpoints: give the output_dir of a training run")
    batch = task.sample(n, length=length, seed=seed)
    classes = classes_of(task, batch.tokens)
    found = []
    with Progress("attribution", len(folders), unit="sequences", quiet=quiet) as progress:
        for folder in folders:
            model = load_recurrent(folder, device=device)
            measured = attribution(model, batch, classes)
            found.append(_row(checkpoint.steps(folder), measured))
            progress.advance(1, n)
    return found


def _row(step: int, measured: Attribution) -> AttributionRow:
    rare, frequent = measured.squares
    both = rare + frequent
    if not all((tokens > 0).sum() > 1 for tokens in measured.tokens):
        raise UserError(
            "fewer than two of the drawn sequences have a rare, or a frequent, token: give a "
            "larger --n"
        )
    # A gradient of 0 is not attributed to any token.
    share = torch.where(both > 0, rare / both, 0.0)
    per_token = [
        (squares[tokens > 0] / tokens[tokens > 0])
        for squares, tokens in zip(measured.squares, measured.tokens, strict=True)
    ]
    return AttributionRow(step, *(mean(v.tolist()) for v in (rare, frequent, share, *per_token)))


def rows(readings: Sequence[AttributionRow]) -> list[list[str]]:
    """Return the cells of a table, in the order of the fields."""
    return [
        [f"{reading.step:,}", *(f"{e.mean:.3g} [{e.low:.3g}, {e.high:.3g}]" for e in reading[1:])]
        for reading in readings
    ]
