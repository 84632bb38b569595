"""Spectra of the Jacobian of one step of a cell, ∂ state after a token / ∂ state before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, svds
from torch import Tensor
from torch.autograd.functional import jvp, vjp

from longrnn.cells import Cell, Edit
from longrnn.state import PyTree, leaves, tree_map

# Matrices of at most so many rows are computed explicitly; of larger ones ARPACK (scipy) finds the
# largest eigenvalue and singular value from products with vectors, to this relative tolerance.
DENSE, EIGEN_TOLERANCE = 1024, 1e-8


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

        before = tree_map(restored, state)
        # An edit makes the cells of torch.nn run in plain operations, differentiable twice.
        return flatten(cell(x.detach().expand(len(flat), -1, -1), before, Edit())[1])

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
