"""Stability of the gradient through a sequence task, as in arXiv 2402.00236.

z is the state of all layers after the first token (h; h and c of an LSTM; the convolution inputs
and state of a Mamba-2), y the last output before the head, and J = ∂y/∂z. Two inputs A and B that
share the first token, or all tokens after it, have

    stability = Σ_i ⟨J_i^A, J_i^B⟩ / Σ_i ‖J_i^A‖ ‖J_i^B‖

over the rows i of J: the mean cosine of the gradients, weighted by their norms. It is 1 if both
inputs have the same gradient, and 0 if the two gradients are orthogonal.

The first token is the target, the tokens after it are the disturbants. Each condition of the task
is measured with separate triplets: `reverse_dual_frequency` has four, a frequent or rare target
with frequent or rare disturbants. Other tasks draw all tokens uniformly from one vocabulary.

J is exact. It is computed one row at a time for all inputs, and is never stored completely.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.data import Condition, Transduction
from longrnn.errors import UserError
from longrnn.hf.loading import load_recurrent
from longrnn.intervals import Estimate, mean
from longrnn.models.recurrent import RecurrentLM
from longrnn.progress import Progress
from longrnn.seeds import seeded
from longrnn.state import LMState, detach, leaves, tree_map
from longrnn.training import checkpoint
from longrnn.units import check_count

# Number of inputs whose rows of J are computed together, which limits memory.
INPUTS = 192
# Triplets per condition and checkpoint, as in the source.
TRIPLETS = 1024


class Stability(NamedTuple):
    """Results for n triplets, `(n,)` each.

    Attributes:
        same_token: stability of two inputs that share the first token.
        same_suffix: stability of two inputs that share all tokens but the first.
        norm: Frobenius norm of J.
    """

    same_token: Tensor
    same_suffix: Tensor
    norm: Tensor


class StabilityRow(NamedTuple):
    """Means over triplets with intervals, for one checkpoint and condition.

    Attributes:
        step: optimizer steps before the checkpoint.
        condition: see `Condition.name`.
        same_token: see `Stability`.
        same_suffix: see `Stability`.
        norm: see `Stability`.
    """

    step: int
    condition: str | None
    same_token: Estimate
    same_suffix: Estimate
    norm: Estimate


def triplets(
    task: Transduction,
    condition: Condition,
    n: int,
    *,
    length: int,
    generator: torch.Generator,
) -> Tensor:
    """Draw inputs (x, s), (x, s'), (x', s), `(n, 3, 2 · length)`, each followed by query tokens.

    x is the first token, uniform over the targets of the condition; s are the tokens after it,
    uniform over its disturbants. x' differs from x and s' from s, because the stability of equal
    inputs is 1.

    Raises:
        UserError: the length is invalid or below 2, or the condition has a single token to draw
            from.
    """
    task.check(length)
    if length < 2:
        raise UserError(
            f"stability needs tokens after the first, and length {length} has none: give a run "
            "whose length.max is at least 2"
        )
    n_targets, n_others = len(condition.target), len(condition.disturbants)
    if min(n_targets, n_others) < 2:
        raise UserError(
            f"stability compares different tokens, and {condition.name or 'the vocabulary'} has "
            "only one to draw from: give a run with a larger vocab_size"
        )
    x = torch.randint(n_targets, (n, 2, 1), generator=generator)
    suffix = torch.randint(n_others, (n, 2, length - 1), generator=generator)
    shift = torch.randint(1, n_targets, (n, 1), generator=generator)
    first, other = x.unbind(1)
    x[:, 1] = torch.where(first == other, (first + shift) % n_targets, other)
    same = (suffix[:, 0] == suffix[:, 1]).all(1)
    suffix[same, 1, -1] = (suffix[same, 1, -1] + 1) % n_others
    x, suffix = x + condition.target.start, suffix + condition.disturbants.start
    inputs = torch.cat([x[:, [0, 0, 1]], suffix[:, [0, 1, 0]]], dim=2)
    return torch.cat([inputs, torch.full_like(inputs, task.query)], dim=2)


def stability(model: RecurrentLM, inputs: Tensor) -> Stability:
    """Return the stability of a model's gradient on triplets.

    Args:
        model: any cell, any number of layers.
        inputs: `(n, 3, t)` ids: a base, an input that shares its first token, and an input that
            shares all others; t >= 2.
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
        # Rows of a batch are independent: this is row `index` of every input's J.
        rows = torch.cat([g.flatten(1).to(y.dtype) for g in found if g is not None], dim=1)
        base, *others = rows.view(n, 3, -1).unbind(1)
        for pair, other in enumerate(others):
            products[pair] += (base * other).sum(1)
            weights[pair] += base.norm(dim=1) * other.norm(dim=1)
        squares += base.square().sum(1)
    # A gradient of 0 has no direction and counts as orthogonal to every other.
    same = torch.where(weights > 0, products / weights, 0.0)
    return Stability(same[0], same[1], squares.sqrt())


def along_checkpoints(
    run: Path,
    task: Transduction,
    *,
    length: int,
    n: int = TRIPLETS,
    seed: int = 0,
    device: str = "cpu",
    quiet: bool = False,
) -> list[StabilityRow]:
    """Measure all checkpoints of a run on the same triplets, by condition.

    Args:
        run: the output folder of the run.
        task: the task it was trained on.
        length: length of the sequences.
        n: triplets per condition; the published number is 1,024.
        seed: seed of the triplets.
        device: device of the model.
        quiet: show no progress.

    Returns:
        One row per checkpoint and condition, conditions innermost.

    Raises:
        UserError: the run has no checkpoints, n is not positive, or as `triplets`.
    """
    check_count("n", n)
    folders = checkpoint.checkpoints(run)
    if not folders:
        raise UserError(f"{run} has no checkpoints: give the output_dir of a training run")
    generator = seeded(seed)
    inputs_by_condition = [
        (condition.name, triplets(task, condition, n, length=length, generator=generator))
        for condition in task.conditions()
    ]
    found = []
    total = len(folders) * len(inputs_by_condition)
    with Progress("stability", total, unit="inputs", quiet=quiet) as progress:
        for folder in folders:
            model = load_recurrent(folder, device=device)
            for name, inputs in inputs_by_condition:
                estimates = [mean(values.tolist()) for values in stability(model, inputs)]
                found.append(StabilityRow(checkpoint.steps(folder), name, *estimates))
                progress.advance(1, 3 * n)
    return found


def rows(readings: Sequence[StabilityRow]) -> list[list[str]]:
    """Return the cells of a table: step, condition, the two stabilities and the norm of J."""
    return [
        [
            f"{reading.step:,}",
            reading.condition or "all tokens",
            *(
                f"{e.mean:.3f} [{e.low:.3f}, {e.high:.3f}]"
                for e in (reading.same_token, reading.same_suffix)
            ),
            f"{reading.norm.mean:.3g} [{reading.norm.low:.3g}, {reading.norm.high:.3g}]",
        ]
        for reading in readings
    ]
