"""Gradients through time: why a recurrent model forgets, or why its training explodes.

Notable choices:
- Everything is measured in float64, in which vanishing gradients do not underflow.
- h_k is the state that token k passes to token k + 1. Its gradient is computed by autograd over
  calls of one token each, which give the same result as one call.
- loss_T is the loss at the last scored token of a row alone, and T counts the tokens up to it.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, svds
from torch import Tensor
from torch.autograd.functional import jvp, vjp
from torch.nn import functional as F

from longrnn.cells import Cell, Edit, ScanningCell
from longrnn.cells.observe import watch
from longrnn.data import Batch, Task
from longrnn.models import TrainableLM
from longrnn.models.finite import refuse_nonfinite
from longrnn.progress import Progress
from longrnn.state import PyTree, leaves, tree_map

# Number of sequences.
SEQUENCES = 8
# Tokens of the first sequence at which spectra are taken, evenly spaced.
READINGS = 16
# Ends and number of the bins of histograms, as powers of ten; smaller values count in the first.
LOWEST, HIGHEST, BINS = -16, 2, 36
# Matrices of at most this many rows are computed explicitly; ARPACK (scipy) finds the largest
# eigenvalue and singular value of larger ones by products with vectors, to a relative tolerance.
DENSE, EIGEN_TOLERANCE = 1024, 1e-8
Record = dict[str, Any]


def measure(
    model: TrainableLM, task: Task, length: int, *, rows: int = SEQUENCES, name: str = ""
) -> list[Record]:
    """Measure the gradients of a model on a task.

    Args:
        model: whose cells have recurrent weights.
        task: the source of sequences.
        length: of the task.
        rows: number of sequences.
        name: of the model, beside the progress.

    Returns:
        For each layer: `norm`, the geometric mean over sequences of ‖∂loss_T/∂h_k‖ at distances
        T − k from 1 to T; `factor`, by which it changes per token; `radius` and `singular`, the
        mean spectral radius and the largest singular value of the step Jacobian; and `histogram` of
        log10 |∂loss_T/∂w| over the recurrent weights w, with the centres of its `bins`.

    Raises:
        UserError: the task cannot make such a length, or logits are not finite.
    """
    batch = task.sample(rows, length=length).to(next(model.parameters()).device)
    with torch.no_grad():
        refuse_nonfinite(model(batch.tokens).logits, model, batch.tokens)
    wide = model.in_float64().eval()
    for cell in wide.cells:
        if isinstance(cell, ScanningCell):
            cell.backend = "torch"  # which has second derivatives
    tokens, targets = last_scored(batch)
    calls: list[list[tuple[Tensor, PyTree]]] = [[] for _ in wide.cells]

    def keep(layer: int, x: Tensor, state: PyTree, *_: Any) -> None:
        calls[layer].append((x[:1], tree_map(lambda leaf: leaf[:1], state)))

    places = np.unique(np.linspace(0, tokens.shape[1] - 1, READINGS).round().astype(int))
    spectra: list[list[tuple[float, float]]] = [[] for _ in wide.cells]
    steps = 1 + len(places) * len(spectra)
    with Progress(f"gradients {name}", steps, unit="steps") as progress:
        with watch(wide.cells, keep):
            norms, weights = through_time(wide, tokens, targets)
        progress.advance(1, 1)
        for of_cell, cell, inputs in zip(spectra, wide.cells, calls, strict=True):
            for place in places:
                of_cell.append(spectrum(jacobian(cell, *inputs[place])))
                progress.advance(1, 1)
    sizes = [gradient.abs().log10().clamp(LOWEST, HIGHEST) for gradient in weights]
    width = (HIGHEST - LOWEST) / BINS
    bins = [LOWEST + width * (place + 0.5) for place in range(BINS)]
    return [
        {
            "layer": layer,
            "norm": values.log().mean(0).exp().tolist(),
            "factor": factor_per_token(values),
            "radius": sum(radius for radius, _ in pairs) / len(pairs),
            "singular": max(singular for _, singular in pairs),
            "bins": bins,
            "histogram": torch.histc(entries, BINS, LOWEST, HIGHEST).long().tolist(),
        }
        for layer, (values, entries, pairs) in enumerate(zip(norms, sizes, spectra, strict=True))
    ]


def last_scored(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the tokens up to the last scored one, `(b, T)`, and its targets, `(b,)`.

    Rows that end before it are left out.
    """
    scored = batch.answers()
    last = int(scored.any(0).nonzero()[-1])
    rows = scored[:, last]
    return batch.tokens[rows, : last + 1], batch.targets[rows, last]


def through_time(
    model: TrainableLM, tokens: Tensor, targets: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Follow the gradient of the loss at the last token back through time.

    Args:
        model: in float64.
        tokens: `(b, T)`.
        targets: `(b,)`, the token after the last.

    Returns:
        By layer: norms of the gradient of each row's loss in its states, `(b, T)` at distances 1 to
        T; and the gradient of the mean loss in the recurrent weights, flat.
    """
    state, given, logits = model.init_state(len(tokens)), [], tokens
    for leaf in numbers(model.cell_states(state)):
        leaf.requires_grad_()
    for token in tokens.split(1, dim=1):
        # A separate node, so that the gradient excludes the path through the layer above.
        state = state._replace(layers=tree_map(lambda leaf: leaf.view_as(leaf), state.layers))
        given.append([numbers(cell_state) for cell_state in model.cell_states(state)])
        logits, state = model(token, state, keep=1)
    loss = F.cross_entropy(logits[:, -1], targets, reduction="sum")
    weights = []
    for cell in model.cells:
        names = cell.recurrent_weights or dict(cell.named_parameters())
        weights.append([cell.get_parameter(name) for name in names])
    flat = [leaf for step in given for layer in step for leaf in layer]
    flat += [weight for of_cell in weights for weight in of_cell]
    gradients = iter(torch.autograd.grad(loss, flat, materialize_grads=True))
    squares = [
        [sum(next(gradients).flatten(1).square().sum(1) for _ in layer) for layer in step]
        for step in given
    ]
    norms = [torch.stack(series[::-1], 1).sqrt() for series in zip(*squares, strict=True)]  # type: ignore[arg-type]
    by_layer = [torch.cat([next(gradients).flatten() for _ in of_cell]) for of_cell in weights]
    return norms, [gradient / len(tokens) for gradient in by_layer]


def factor_per_token(values: Tensor) -> float | None:
    """Return the factor by which norms change per token, from the slope of the far half.

    Args:
        values: `(b, T)` norms at distances 1 to T. A row with a norm of 0 there has no slope.
    """
    far = values[:, values.shape[1] // 2 :].log()
    far = far[far.isfinite().all(1)]
    if far.shape[1] < 2 or not len(far):
        return None
    slopes = np.polyfit(range(far.shape[1]), far.T.cpu(), 1)[0]
    return math.exp(min(slopes.mean(), 700))


def jacobian(cell: Cell, x: Tensor, state: PyTree) -> LinearOperator:
    """Return the Jacobian of one step of a cell in its flat state, `(n, n)`.

    Args:
        cell: in float64, with the backend `torch`, which has second derivatives.
        x: `(1, 1, d_input)`, the input.
        state: of one row, before the token.
    """
    start = flatten(state).detach()
    shapes = [leaf.shape[1:] for leaf in numbers(state)]

    def step(flat: Tensor) -> Tensor:
        parts = iter(flat.split([shape.numel() for shape in shapes], dim=1))

        def restored(leaf: Tensor) -> Tensor:
            shape = len(flat), *leaf.shape[1:]
            return next(parts).reshape(shape) if leaf.is_floating_point() else leaf.expand(shape)

        given = tree_map(restored, state)
        # An edit makes the cells of torch.nn run in plain operations, differentiable twice.
        return flatten(cell(x.detach().expand(len(flat), -1, -1), given, Edit())[1])

    def on_columns(product: Callable[..., Any]) -> Callable[[np.ndarray], np.ndarray]:
        def apply(columns: np.ndarray) -> np.ndarray:
            rows = torch.from_numpy(columns.reshape(len(columns), -1).T.copy()).to(start)
            products = product(step, start.repeat(len(rows), 1), rows)[1]
            return products.T.reshape(columns.shape).cpu().numpy()

        return apply

    forward, transposed = on_columns(jvp), on_columns(vjp)
    build: Any = LinearOperator  # whose types do not know the functions
    functions = {"rmatvec": transposed, "matmat": forward, "rmatmat": transposed}
    return build((start.shape[1],) * 2, forward, **functions, dtype=np.float64)


def flatten(state: PyTree) -> Tensor:
    """Return all numbers of a state, `(b, n)`."""
    return torch.cat([leaf.flatten(1) for leaf in numbers(state)], dim=1)


def numbers(state: PyTree) -> list[Tensor]:
    """Return the leaves of a state that have gradients: not flags."""
    return [leaf for _, leaf in leaves(state) if leaf.is_floating_point()]


def spectrum(operator: LinearOperator, *, dense: int = DENSE) -> tuple[float, float]:
    """Return the spectral radius (NaN if ARPACK found none) and the largest singular value."""
    size = operator.shape[0]
    if size <= dense:
        matrix = operator.rmatmat(np.eye(size))
        largest = np.linalg.svd(matrix, compute_uv=False)[0]
        return float(np.abs(np.linalg.eigvals(matrix)).max()), float(largest)
    start = np.random.default_rng(0).standard_normal(size)
    options: dict[str, Any] = {"k": 1, "tol": EIGEN_TOLERANCE, "v0": start}
    try:
        values: Any = eigs(operator, return_eigenvectors=False, **options)
    except ArpackNoConvergence as error:
        values = error.eigenvalues
    singular: Any = svds(operator, return_singular_vectors=False, **options)
    return float(max(np.abs(values), default=math.nan)), float(singular[0])
