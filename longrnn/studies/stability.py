"""Stability of the gradient through a sequence task, as in arXiv 2402.00236.

z is all that a model carries after its first token (h; h and c of an LSTM; the convolution and the
state of a Mamba-2; of every layer), y its last output before the head, J = ∂y/∂z. Two inputs A and
B that share the first token, or all that comes after it, have

    stability = Σ_i ⟨J_i^A, J_i^B⟩ / Σ_i ‖J_i^A‖ ‖J_i^B‖

over the rows i of J: the mean cosine of the gradients, weighted by their norms. 1 where the
gradient is the same in both, 0 where it has nothing in common. J is exact, a row at a time for all
inputs together, and never held whole.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.hf.loading import load_recurrent
from longrnn.intervals import Estimate, mean
from longrnn.models.recurrent import RecurrentLM
from longrnn.progress import Progress
from longrnn.seeds import seeded
from longrnn.state import LMState, detach, leaves, tree_map
from longrnn.tasks.sequence import Transduction
from longrnn.training import checkpoint

# Inputs whose rows of J are made together: a bound on memory.
INPUTS = 192


class Stability(NamedTuple):
    """For each of n triplets, `(n,)` each.

    Attributes:
        same_token: stability of two inputs that share the first token.
        same_suffix: of two inputs that share all but the first token.
        norm: Frobenius norm of J.
    """

    same_token: Tensor
    same_suffix: Tensor
    norm: Tensor


class Reading(NamedTuple):
    """A checkpoint's step, and means over triplets with their intervals."""

    step: int
    same_token: Estimate
    same_suffix: Estimate
    norm: Estimate


def triplets(task: Transduction, n: int, length: int, generator: torch.Generator) -> Tensor:
    """`(n, 3, 2 · length)` inputs (x, s), (x, s'), (x', s), uniform over the vocabulary.

    x is the first token, s the tokens after it; query tokens follow. x' is never x: an input beside
    itself would count as stable.

    Raises:
        UserError: a length that the task does not have, or one at which there are no other tokens.
    """
    task.check(length)
    if length < 2:
        raise UserError(
            f"stability needs tokens after the first: length {length} is too small, give at least 2"
        )
    x = torch.randint(task.n_tokens, (n, 2, 1), generator=generator)
    suffix = torch.randint(task.n_tokens, (n, 2, length - 1), generator=generator)
    # Drawn last, so that triplets without such a pair stay what they were.
    shift = torch.randint(1, task.n_tokens, (n, 1), generator=generator)
    first, other = x.unbind(1)
    x[:, 1] = torch.where(first == other, (first + shift) % task.n_tokens, other)
    inputs = torch.cat([x[:, [0, 0, 1]], suffix[:, [0, 1, 0]]], dim=2)
    return torch.cat([inputs, torch.full_like(inputs, task.query)], dim=2)


def stability(model: RecurrentLM, inputs: Tensor) -> Stability:
    """The stability of a model's gradient on triplets.

    Args:
        model: any cell, any number of layers.
        inputs: `(n, 3, t)` ids: a base, one that shares its first token, one that shares the
            others; t >= 2.
    """
    device = model.embedding.weight.device
    model = copy.deepcopy(model).requires_grad_(False)  # no gradient of weights is computed
    parts = [
        _stability(model, part.to(device)) for part in inputs.split(max(1, INPUTS // 3), dim=0)
    ]
    return Stability(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


def _stability(model: RecurrentLM, inputs: Tensor) -> Stability:
    n, _, time = inputs.shape
    tokens = inputs.reshape(3 * n, time)
    with torch.no_grad():
        state = model(tokens[:, :1], keep=0).state
    layers = tree_map(lambda leaf: leaf.detach().requires_grad_(), detach(state.layers))
    z = [leaf for _, leaf in leaves(layers)]
    y, _ = model.hidden(tokens[:, 1:], LMState(state.position, layers), keep=1)

    products = y.new_zeros(2, n)
    weights = y.new_zeros(2, n)
    squares = y.new_zeros(n)
    for index in range(y.shape[-1]):
        found = torch.autograd.grad(y[:, 0, index].sum(), z, retain_graph=True, allow_unused=True)
        # Rows of a batch do not know each other: this is row `index` of every input's J.
        rows = torch.cat([g.flatten(1).to(y.dtype) for g in found if g is not None], dim=1)
        base, *others = rows.view(n, 3, -1).unbind(1)
        for pair, other in enumerate(others):
            products[pair] += (base * other).sum(1)
            weights[pair] += base.norm(dim=1) * other.norm(dim=1)
        squares += base.square().sum(1)
    # A gradient that has vanished altogether has no direction: 0, as where nothing is shared.
    same = torch.where(weights > 0, products / weights, 0.0)
    return Stability(same[0], same[1], squares.sqrt())


def along_checkpoints(
    run: Path,
    task: Transduction,
    *,
    length: int,
    n: int = 64,
    seed: int = 0,
    device: str = "cpu",
    quiet: bool = False,
) -> list[Reading]:
    """The stability at every checkpoint that a run has kept, on the same triplets.

    Args:
        run: its output folder.
        task: that it was trained on.
        length: of the sequences.
        n: triplets; the published number is 1,024.
        seed: of the triplets.
        device: where to compute.
        quiet: no progress.

    Raises:
        UserError: the run has no checkpoints, or n is not positive.
    """
    if n < 1:
        raise UserError(
            f"the number of triplets must be at least 1, not {n}: give a positive number"
        )
    folders = checkpoint.checkpoints(run)
    if not folders:
        raise UserError(f"{run} has no checkpoints: give the output_dir of a training run")
    inputs = triplets(task, n, length, seeded(seed))
    readings = []
    with Progress("stability", len(folders), unit="inputs", quiet=quiet) as progress:
        for folder in folders:
            found = stability(load_recurrent(folder, device=device), inputs)
            estimates = [mean(values.tolist()) for values in found]
            readings.append(Reading(checkpoint.steps(folder), *estimates))
            progress.advance(1, 3 * n)
    return readings


def rows(readings: Sequence[Reading]) -> list[list[str]]:
    """Cells of a table: step, the two stabilities and the norm of J."""
    return [
        [
            f"{reading.step:,}",
            *(f"{e.mean:.3f} [{e.low:.3f}, {e.high:.3f}]" for e in reading[1:3]),
            f"{reading.norm.mean:.3g} [{reading.norm.low:.3g}, {reading.norm.high:.3g}]",
        ]
        for reading in readings
    ]
