"""Measures gradients through time: why a recurrent model forgets, or why its training explodes.

Notable choices:
- Everything is measured in float64, in which vanishing gradients do not underflow.
- If loss or gradient are not finite in the model's own dtype, only this is reported.
- h_k is the state that token k passes to token k + 1. Its gradient is computed by autograd over
  calls of one token each, which give the same result as one call.
- loss_T is the loss at the last scored token of a row alone, and T counts the tokens up to it.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.cells import ScanningCell
from longrnn.data import Batch, Task
from longrnn.diagnostics.jacobian import jacobians
from longrnn.errors import UserError
from longrnn.files import write_atomic
from longrnn.intervals import Estimate, mean
from longrnn.models import RecurrentLM
from longrnn.progress import Progress
from longrnn.state import LMState, leaves, tree_map

FORMAT = "longrnn-gradients-1"
# Defaults: lengths of the task, sequences of each length, Lyapunov exponents per layer.
LENGTHS, ROWS, EXPONENTS = (16, 32, 64), 8, 8
# Edges of the histograms as powers of ten; values outside count in the first or last bin.
BINS = [exponent / 2 for exponent in range(-32, 5)]
DEFINITION = (
    "Norms are those of ∂loss_T/∂h_k: h_k is the state that token k passes to token k + 1, and "
    "loss_T the loss at the last scored token alone. Slopes are fitted to the far half of the "
    "distances T − k. Jacobians are those of one layer's state after a token with respect to its "
    "state before it, at the input that the layer reads there."
)
Row = dict[str, Any]


class GradientRecord(NamedTuple):
    """The content of gradients.jsonl: the header `about`, and all other `rows`."""

    about: Row
    rows: list[Row]

    def of(self, kind: str, **fields: Any) -> list[Row]:
        """Returns the rows of one kind whose fields have these values."""
        wanted = {"kind": kind, **fields}
        return [row for row in self.rows if wanted.items() <= row.items()]


def diagnose(
    models: Mapping[str, RecurrentLM],
    task: Task,
    *,
    output: Path,
    lengths: Sequence[int] = LENGTHS,
    rows: int = ROWS,
    exponents: int = EXPONENTS,
    described: str = "",
    quiet: bool = False,
) -> GradientRecord:
    """Measures gradients of models on one task, and writes `gradients.jsonl`.

    Args:
        models: by name.
        task: the source of sequences.
        output: a folder; the file appears when it is complete.
        lengths: lengths of the task; norms and Jacobians are measured at the last one.
        rows: sequences of each length.
        exponents: Lyapunov exponents per layer.
        described: description of the task, for the record.
        quiet: show no progress.

    Raises:
        UserError: a model without recurrent weights or with too few ids, or lengths that the task
            cannot make.
    """
    for model in models.values():
        _check(model, task)
    batches = {length: task.sample(rows, length=length) for length in lengths}
    found: list[Row] = []
    steps = len(models) * len(batches)
    with Progress("gradients", steps, unit="lengths", quiet=quiet) as progress:
        for name, model in models.items():
            for length, batch in batches.items():
                last = exponents if length == lengths[-1] else None
                measured = _measure(model, batch, length, last)
                found += [{"subject": name, **row} for row in measured]
                progress.advance(1, 1, name)
    head = {
        "format": FORMAT,
        "task": described,
        "subjects": {name: model.fingerprint() for name, model in models.items()},
        "lengths": list(lengths),
        "rows": rows,
        "definition": DEFINITION,
    }
    lines = [json.dumps(_plain(row), ensure_ascii=False) for row in (head, *found)]
    write_atomic(output / "gradients.jsonl", "".join(f"{line}\n" for line in lines))
    return GradientRecord(head, found)


def default_lengths(task: Task) -> list[int]:
    """Returns LENGTHS, or the default length of a task for which these are too short."""
    try:
        task.sample(1, length=min(LENGTHS))
    except UserError:
        return [task.default_length]
    return list(LENGTHS)


def _check(model: object, task: Task) -> None:
    """Refuses a model without recurrent weights or with fewer ids than the task."""
    if not isinstance(model, RecurrentLM) or not all(m.recurrent_weights for m in model.cells):
        raise UserError(
            f"a {type(model).__name__} has no recurrent weights whose gradient could be followed: "
            "give a checkpoint or configuration of an RNN, GRU, LSTM or Mamba-2"
        )
    if model.vocab_size < task.vocab_size:
        raise UserError(
            f"the task uses {task.vocab_size} token ids and the model has {model.vocab_size}: give "
            "the task that the model was made for"
        )


def _measure(model: RecurrentLM, batch: Batch, length: int, exponents: int | None) -> Iterator[Row]:
    """Yields the rows of one model and length; norms and Jacobians only with `exponents`."""
    batch = batch.to(next(model.parameters()).device)
    where = nonfinite(model, batch)
    if where is not None:
        yield {"kind": "nonfinite", "length": length, "where": where}
        return
    wide = copy.deepcopy(model).double().eval()
    for cell in wide.cells:
        if isinstance(cell, ScanningCell):
            cell.backend = "torch"  # which has second derivatives
    loss = loss_of(wide, batch)
    gradients = torch.autograd.grad(loss, list(wide.parameters()), materialize_grads=True)
    norm = torch.cat([one.flatten() for one in gradients]).norm()
    yield {"kind": "loss", "length": length, "loss": float(loss.detach()), "norm": float(norm)}
    tokens, targets = last_scored(batch)
    run = Run(wide, tokens)
    for layer, gradient in enumerate(run.weight_gradients(targets)):
        yield {"kind": "weights", "length": length, "layer": layer, **histogram(gradient)}
    if exponents is not None:
        for row in norms(run, targets):
            yield {"kind": "norms", **row}
        yield from jacobians(wide, tokens[:1], exponents)


def loss_of(model: RecurrentLM, batch: Batch) -> Tensor:
    """Returns the mean loss over the scored tokens of a batch."""
    return F.cross_entropy(model(batch.tokens).logits.transpose(1, 2), batch.targets)


def nonfinite(model: RecurrentLM, batch: Batch) -> str | None:
    """Names what is not finite first: a weight, a state and its token, the loss, or a gradient.

    Returns:
        None if weights, states, loss and gradients are finite.
    """
    named = dict(model.named_parameters())
    for name, weight in named.items():
        if not weight.isfinite().all():
            return f"the weight {name} is not finite"
    state = model.init_state(len(batch.tokens))
    with torch.no_grad():
        for position, token in enumerate(batch.tokens.split(1, dim=1)):
            state = model(token, state, keep=0).state
            bad = [name for name, leaf in leaves(state.layers) if not leaf.isfinite().all()]
            if bad:
                return f"the state layers.{bad[0]} is not finite after token {position}"
    loss = loss_of(model, batch)
    if not loss.isfinite():
        return "the loss is not finite"
    gradients = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    for name, gradient in zip(named, gradients, strict=True):
        if not gradient.isfinite().all():
            return f"the gradient of {name} is not finite"
    return None


def last_scored(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the tokens up to the last scored one, `(b, T)`, and its targets, `(b,)`.

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
    """

    def __init__(self, model: RecurrentLM, tokens: Tensor) -> None:
        self.model = model
        self.before: list[tuple[Any, ...]] = []
        state = tree_map(_real, model.init_state(len(tokens)))
        for token in tokens.split(1, dim=1):
            # A separate node, so that the gradient excludes the path through the layer above.
            layers = tree_map(lambda leaf: leaf.view_as(leaf), state.layers)
            self.before.append(layers)
            self.logits, state = model(token, LMState(state.position, layers), keep=1)
        self.logits = self.logits[:, -1]

    def weight_gradients(self, targets: Tensor) -> list[Tensor]:
        """Returns flat gradients of the mean loss in the recurrent weights, by layer."""
        loss = F.cross_entropy(self.logits, targets)
        by_layer = [[m.get_parameter(n) for n in m.recurrent_weights] for m in self.model.cells]
        flat = [weight for weights in by_layer for weight in weights]
        found = iter(torch.autograd.grad(loss, flat, retain_graph=True, materialize_grads=True))
        return [torch.cat([next(found).flatten() for _ in weights]) for weights in by_layer]

    def state_gradients(self, targets: Tensor) -> list[dict[str, Tensor]]:
        """Returns gradient norms in each part of the state, by layer.

        Returns:
            For each layer, by part: `(b, T)`, at distances 1 to T; `state` is the whole state.
        """
        loss = F.cross_entropy(self.logits, targets, reduction="sum")
        named = [list(leaves(layers)) for layers in self.before]
        flat = [leaf for step in named for _, leaf in step]
        found = iter(torch.autograd.grad(loss, flat, materialize_grads=True))
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


def norms(run: Run, targets: Tensor) -> Iterator[Row]:
    """Yields norms of ∂loss_T/∂h_k by layer and part of the state, with their log slope."""
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
    """Fits the slope of log norm by distance over the far half of distances.

    Args:
        values: `(b, T)` norms at distances 1 to T. A row with a norm of 0 there has no slope.

    Returns:
        Mean over rows with Student's interval, in nats per token; None if no row has a slope.
    """
    far = values[:, values.shape[1] // 2 :].log()
    far = far[far.isfinite().all(1)]
    if far.shape[1] < 2 or not len(far):
        return None
    x = torch.arange(far.shape[1], dtype=far.dtype, device=far.device)
    x -= x.mean()
    return mean(((far @ x) / x.square().sum()).tolist())


def histogram(gradient: Tensor) -> Row:
    """Returns counts of log10 |g| in BINS, with norm, median and largest entry."""
    size = gradient.abs().cpu()
    nonzero = size[size > 0]
    edges = torch.tensor(BINS, dtype=size.dtype)
    bins = torch.bucketize(nonzero.log10(), edges).clamp(1, len(BINS) - 1) - 1
    return {
        "counts": torch.bincount(bins, minlength=len(BINS) - 1).tolist(),
        "zeros": int(size.numel() - nonzero.numel()),
        "norm": float(gradient.norm()),
        "median": float(size.median()),
        "largest": float(size.max()),
    }


def _real(leaf: Tensor) -> Tensor:
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def _plain(value: Any) -> Any:
    """Returns a value for JSON; numbers that are not finite become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
