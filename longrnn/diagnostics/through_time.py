"""Gradients through time: of the state by distance, of the recurrent weights, and under clipping.

Notable choices:
- h_k is the state that token k passes to token k + 1. Its gradient is computed by autograd over
  calls of one token each, which give the same result as one call.
- loss_T is the loss at the last scored token of a row alone, and T counts the tokens up to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.data import Batch
from longrnn.intervals import Estimate, mean
from longrnn.models import RecurrentLM
from longrnn.state import LMState, leaves, tree_map
from longrnn.training.objective import Objective

# Edges of the histograms as powers of ten; values outside count in the first or last bin.
BINS = [exponent / 2 for exponent in range(-32, 5)]


def last_scored(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the tokens up to the last scored one, `(b, T)`, and its targets, `(b,)`.

    Rows that end before it are left out.
    """
    scored = batch.answers()
    last = int(scored.any(0).nonzero()[-1])
    rows = scored[:, last]
    return batch.tokens[rows, : last + 1], batch.targets[rows, last]


class Run:
    """One pass over sequences, token by token, with the autograd graph kept.

    Args:
        model: in float64.
        tokens: `(b, T)`.

    Attributes:
        inputs: the state before each token.
        logits: `(b, v)`, of the last token.
    """

    def __init__(self, model: RecurrentLM, tokens: Tensor) -> None:
        self.model = model
        self.inputs: list[tuple[Any, ...]] = []
        state = tree_map(_real, model.init_state(len(tokens)))
        for token in tokens.split(1, dim=1):
            # A separate node, so that the gradient excludes the path through the layer above.
            layers = tree_map(lambda leaf: leaf.view_as(leaf), state.layers)
            self.inputs.append(layers)
            self.logits, state = model(token, LMState(state.position, layers), keep=1)
        self.logits = self.logits[:, -1]

    def loss(self, targets: Tensor) -> Tensor:
        """Return the loss at the last token, `(b,)`."""
        return F.cross_entropy(self.logits, targets, reduction="none")

    def weight_gradients(self, targets: Tensor) -> list[Tensor]:
        """Return flat gradients of the mean loss with respect to recurrent weights, by layer."""
        named = [[m.get_parameter(n) for n in m.recurrent_weights] for m in self.model.cells]
        flat = [weight for weights in named for weight in weights]
        found = iter(
            torch.autograd.grad(
                self.loss(targets).mean(), flat, retain_graph=True, materialize_grads=True
            )
        )
        return [torch.cat([next(found).flatten() for _ in weights]) for weights in named]

    def state_gradients(self, targets: Tensor) -> list[dict[str, Tensor]]:
        """Return gradient norms with respect to each part of the state, by layer.

        Returns:
            For each layer, by part: `(b, T)`, at distances 1 to T; `state` is the whole state.
        """
        named = [list(leaves(layers)) for layers in self.inputs]
        flat = [leaf for step in named for _, leaf in step]
        found = iter(torch.autograd.grad(self.loss(targets).sum(), flat, materialize_grads=True))
        by_name: dict[str, list[Tensor]] = {}
        for step in named:
            for name, _ in step:
                by_name.setdefault(name, []).append(next(found).flatten(1).norm(dim=1))
        table: list[dict[str, Tensor]] = [{} for _ in self.model.cells]
        for name, series in by_name.items():
            layer, _, part = name.partition(".")
            table[int(layer)][part] = torch.stack(series, dim=1).flip(1)
        for parts in table:
            parts["state"] = torch.stack(list(parts.values())).square().sum(0).sqrt()
        return table


def norms(run: Run, targets: Tensor) -> Iterator[dict[str, Any]]:
    """Yield norms of ∂loss_T/∂h_k by layer and part of the state, with their log slope."""
    for layer, parts in enumerate(run.state_gradients(targets)):
        for part, values in parts.items():
            slope = fitted_slope(values)
            yield {
                "layer": layer,
                "part": part,
                # Geometric mean over rows, and the smallest and largest row.
                "norm": values.log().mean(0).exp().tolist(),
                "low": values.amin(0).tolist(),
                "high": values.amax(0).tolist(),
                "slope": None if slope is None else slope._asdict(),
            }


def fitted_slope(values: Tensor) -> Estimate | None:
    """Fit the slope of log norm by distance over the far half of distances.

    Args:
        values: `(b, T)` norms at distances 1 to T. A row with a norm of 0 there has no slope.

    Returns:
        Mean over rows with Student's interval, in nats per token; None if no row has a slope.
    """
    length = values.shape[1]
    far = values[:, length // 2 :].log()
    far = far[far.isfinite().all(1)]
    if far.shape[1] < 2 or not len(far):
        return None
    x = torch.arange(far.shape[1], dtype=far.dtype, device=far.device)
    x -= x.mean()
    return mean(((far @ x) / x.square().sum()).tolist())


def histogram(gradient: Tensor) -> dict[str, Any]:
    """Return counts of log10 |g| in BINS, with norm, median and largest entry."""
    size = gradient.abs()
    nonzero = size[size > 0]
    edges = torch.tensor(BINS, dtype=size.dtype, device=size.device)
    bins = torch.bucketize(nonzero.log10(), edges).clamp(1, len(BINS) - 1) - 1
    return {
        "counts": torch.bincount(bins, minlength=len(BINS) - 1).tolist(),
        "zeros": int(size.numel() - nonzero.numel()),
        "norm": float(gradient.norm()),
        "median": float(size.median()),
        "largest": float(size.max()),
    }


def clipping(
    model: RecurrentLM, batch: Batch, max_grad_norm: float, max_grad_value: float
) -> dict[str, Any]:
    """Return how clipping by norm and by value would change the gradient of the training loss."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = Objective(model)([batch], model.init_state(len(batch.tokens))).loss
    found = torch.autograd.grad(loss, parameters, materialize_grads=True)
    gradient = torch.cat([g.flatten() for g in found])
    cut = gradient.clamp(-max_grad_value, max_grad_value)
    norm, after = float(gradient.norm()), float(cut.norm())
    direction = cut / cut.abs().max()  # the squares of tiny entries are 0
    return {
        "loss": float(loss.detach()),
        "norm": norm,
        "max_grad_norm": max_grad_norm,
        "norm_factor": min(1.0, max_grad_norm / norm) if norm else 1.0,
        "max_grad_value": max_grad_value,
        "value_norm": after,
        "value_share": float((gradient.abs() > max_grad_value).double().mean()),
        "value_cosine": float(gradient @ direction) / (norm * float(direction.norm()))
        if norm
        else 1.0,
    }


def _real(leaf: Tensor) -> Tensor:
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf
