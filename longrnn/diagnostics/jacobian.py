"""Spectra of the Jacobian of one step of a cell, ∂ state after a token / ∂ state before it.

Matrices of at most DENSE rows are computed explicitly; of larger ones ARPACK (scipy) finds the
largest eigenvalue and singular value from products with vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, svds
from torch import Tensor, nn
from torch.autograd.functional import jvp, vjp

from longrnn.cells import Cell, Edit
from longrnn.models import LanguageModel
from longrnn.state import PyTree, leaves, unflatten

DENSE = 1024
TOLERANCE = 1e-8  # of ARPACK, relative
# Tokens of a sequence at which spectra are taken, evenly spaced.
READINGS = 16


class Spectrum(NamedTuple):
    """The largest modulus of an eigenvalue (NaN if ARPACK found none), and singular value."""

    radius: float
    singular: float


class Step:
    """One step of a cell as a function of its flat state, and products with its Jacobian.

    Args:
        cell: in float64, with the backend `torch`, which has second derivatives.
        x: `(1, 1, d_input)`, the input.
        state: of one row, before the token.
    """

    def __init__(self, cell: Cell, x: Tensor, state: PyTree) -> None:
        self.cell, self.x, self.like = cell, x.detach(), state
        self.start = flatten(state).detach()  # (1, n)

    def after(self, flat: Tensor) -> Tensor:
        """Returns flat states after the token, `(b, n)`, from flat states before it."""
        shapes = [leaf.shape[1:] for _, leaf in leaves(self.like)]
        parts = flat.split([shape.numel() for shape in shapes], dim=1)
        pairs = zip(parts, shapes, strict=True)
        state = unflatten(self.like, [part.reshape(len(flat), *shape) for part, shape in pairs])
        # An edit makes the cells of torch.nn run in plain operations, differentiable twice.
        return flatten(self.cell(self.x.expand(len(flat), -1, -1), state, Edit())[1])

    def transposed(self, vectors: Tensor) -> Tensor:
        """Returns J^T v for each row v, `(b, n)`."""
        return vjp(self.after, self.start.repeat(len(vectors), 1), vectors)[1]  # type: ignore

    def product(self, vectors: Tensor) -> Tensor:
        """Returns J v for each row v, `(b, n)`."""
        return jvp(self.after, self.start.repeat(len(vectors), 1), vectors)[1]  # type: ignore


def flatten(state: PyTree) -> Tensor:
    """Returns all entries of a state, `(b, n)`."""
    return torch.cat([leaf.flatten(1) for _, leaf in leaves(state)], dim=1)


def spectrum(step: Step, *, dense: int = DENSE) -> Spectrum:
    """Returns the spectral radius and the largest singular value of one step."""
    size = step.start.shape[1]
    if size <= dense:
        matrix = step.transposed(torch.eye(size).to(step.start))
        radius = float(torch.linalg.eigvals(matrix).abs().max())
        return Spectrum(radius, float(torch.linalg.matrix_norm(matrix, 2)))

    def on_arrays(apply: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], np.ndarray]:
        def call(vector: np.ndarray) -> np.ndarray:
            row = torch.from_numpy(vector.reshape(1, -1).astype(np.float64))
            return apply(row.to(step.start))[0].cpu().numpy()

        return call

    build: Any = LinearOperator  # whose types do not know the functions
    products = on_arrays(step.product), on_arrays(step.transposed)
    operator = build((size, size), *products, dtype=np.float64)
    options: dict[str, Any] = {"k": 1, "tol": TOLERANCE}
    options["v0"] = np.random.default_rng(0).standard_normal(size)
    try:
        found: Any = eigs(operator, return_eigenvectors=False, **options)
    except ArpackNoConvergence as error:
        found = error.eigenvalues
    singular: Any = svds(operator, return_singular_vectors=False, **options)
    radius = float(np.abs(found).max()) if len(found) else math.nan
    return Spectrum(radius, float(singular[0]))


def spectra(model: LanguageModel, tokens: Tensor) -> list[list[Spectrum]]:
    """Returns spectra of the step Jacobian along one sequence, by layer.

    Args:
        model: in float64, see `Step`.
        tokens: `(1, T)`.
    """
    seen: list[list[Sequence[Any]]] = [[] for _ in model.cells]
    with ExitStack() as hooks, torch.no_grad():
        for cell, kept in zip(model.cells, seen, strict=True):
            hooks.callback(cell.register_forward_pre_hook(partial(_keep, kept)).remove)
        state = None
        for token in tokens.split(1, dim=1):
            state = model(token, state, keep=0).state
    last = tokens.shape[1] - 1
    places = sorted({round(i * last / (READINGS - 1)) for i in range(READINGS)})
    return [
        [spectrum(Step(cell, *calls[place][:2])) for place in places]
        for cell, calls in zip(model.cells, seen, strict=True)
    ]


def _keep(kept: list[Sequence[Any]], module: nn.Module, args: tuple[Any, ...]) -> None:
    kept.append(args)
