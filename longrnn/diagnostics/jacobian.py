"""Spectra of the Jacobian of one step of a cell, ∂ state after a token / ∂ state before it.

Matrices of at most DENSE rows are computed explicitly; of larger ones ARPACK (scipy) finds the
largest eigenvalue and singular value from products with vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, svds
from torch import Tensor, nn

from longrnn.cells import Cell, Edit
from longrnn.models import LanguageModel
from longrnn.seeds import seeded
from longrnn.state import PyTree, leaves, tree_map

DENSE = 1024
TOLERANCE = 1e-8  # of ARPACK, relative


# Tokens of a sequence at which spectra are taken, evenly spaced.
READINGS = 16


class Spectrum(NamedTuple):
    """The spectrum of the Jacobian of one step.

    Attributes:
        radius: largest modulus of an eigenvalue; NaN if ARPACK found none.
        singular: largest singular value.
        method: `dense`, or `arpack` if the matrix is too large to be computed explicitly.
    """

    radius: float
    singular: float
    method: str


class Step:
    """One step of a cell as a function of its flat state, and its Jacobian as an operator.

    Args:
        cell: in float64, with the backend `torch`, which has second derivatives.
        x: `(1, 1, d_input)`, the input.
        state: of one row, before the token.
    """

    def __init__(self, cell: Cell, x: Tensor, state: PyTree) -> None:
        self.cell, self.x = cell, x.detach()
        self.start = flatten(state).detach()  # (1, n)
        self.like = state
        self.size = self.start.shape[1]

    def after(self, flat: Tensor) -> Tensor:
        """Returns flat states after the token, `(b, n)`, from flat states before it."""
        # An edit makes the cells of torch.nn run in plain operations, differentiable twice.
        x = self.x.expand(len(flat), -1, -1)
        return flatten(self.cell(x, unflatten(flat, self.like), Edit())[1])

    def transposed(self, vectors: Tensor) -> Tensor:
        """Returns J^T v for each row v, `(b, n)`."""
        before = self.start.repeat(len(vectors), 1).requires_grad_()
        (found,) = torch.autograd.grad(self.after(before), before, vectors)
        return found

    def product(self, vectors: Tensor) -> Tensor:
        """Returns J v for each row v, `(b, n)`."""
        before = self.start.repeat(len(vectors), 1).requires_grad_()
        probe = torch.zeros_like(before).requires_grad_()
        (pulled,) = torch.autograd.grad(self.after(before), before, probe, create_graph=True)
        (found,) = torch.autograd.grad(pulled, probe, vectors)
        return found

    def matrix(self) -> Tensor:
        """Returns J, `(n, n)`: entry (i, j) is ∂ after_i / ∂ before_j."""
        identity = torch.eye(self.size, dtype=self.start.dtype, device=self.start.device)
        return self.transposed(identity)

    def operator(self) -> LinearOperator:
        """Returns J as an operator of scipy."""

        def call(apply: Callable[[Tensor], Tensor], vector: np.ndarray) -> np.ndarray:
            row = torch.from_numpy(np.array(vector, np.float64).reshape(1, -1))
            return apply(row.to(self.start.device))[0].cpu().numpy()

        build: Any = LinearOperator  # whose types do not know the functions
        products = partial(call, self.product), partial(call, self.transposed)
        return build((self.size,) * 2, *products, dtype=np.float64)


def jacobians(model: LanguageModel, tokens: Tensor, exponents: int) -> Iterator[dict[str, Any]]:
    """Yields spectra of the step Jacobian along one sequence, and Lyapunov exponents, by layer.

    Args:
        model: in float64, see `Step`.
        tokens: `(1, T)`.
        exponents: how many Lyapunov exponents.
    """
    inputs: list[list[Tensor]] = [[] for _ in model.cells]
    with ExitStack() as hooks:
        for cell, kept in zip(model.cells, inputs, strict=True):
            keep = partial(_keep_input, kept)
            hooks.callback(cell.register_forward_pre_hook(keep).remove)
        states = [model.init_state(1)]
        with torch.no_grad():
            for token in tokens.split(1, dim=1):
                states.append(model(token, states[-1], keep=0).state)
    time = tokens.shape[1]
    readings = sorted({round(i * (time - 1) / (READINGS - 1)) for i in range(READINGS)})
    for layer, cell in enumerate(model.cells):
        generator = seeded(0)
        steps = [Step(cell, inputs[layer][t], states[t].layers[layer]) for t in range(time)]
        for position in readings:
            found = spectrum(steps[position], generator)._asdict()
            size = steps[position].size
            yield {"kind": "jacobian", "layer": layer, "position": position, "size": size, **found}
        largest = lyapunov(steps, exponents, generator)
        yield {"kind": "lyapunov", "layer": layer, "exponents": largest}


def _keep_input(kept: list[Tensor], module: nn.Module, args: tuple[Any, ...]) -> None:
    kept.append(args[0])


def spectrum(step: Step, generator: torch.Generator, *, dense: int = DENSE) -> Spectrum:
    """Returns the spectral radius and the largest singular value of one step."""
    if step.size <= dense:
        matrix = step.matrix()
        radius = float(torch.linalg.eigvals(matrix).abs().max())
        return Spectrum(radius, float(torch.linalg.matrix_norm(matrix, 2)), "dense")
    options: dict[str, Any] = {"k": 1, "tol": TOLERANCE}
    options["v0"] = _normal(1, step, generator)[0].cpu().numpy()
    try:
        found: Any = eigs(step.operator(), return_eigenvectors=False, **options)
    except ArpackNoConvergence as error:
        found = error.eigenvalues
    radius = float(np.abs(found).max()) if len(found) else math.nan
    singular: Any = svds(step.operator(), return_singular_vectors=False, **options)
    return Spectrum(radius, float(singular[0]), "arpack")


def lyapunov(steps: Sequence[Step], count: int, generator: torch.Generator) -> list[float]:
    """Returns the largest Lyapunov exponents of the product of the steps, descending.

    By the QR method: an orthonormal frame is multiplied by each step's Jacobian and orthonormalised
    again; an exponent is the mean logarithm of the stretching of its vector (Benettin et al.,
    1980). The first half of the steps only aligns the frame; over T steps, directions whose
    exponents differ by less than about 1/T cannot be separated.

    Args:
        steps: of consecutive tokens.
        count: number of exponents, limited to the size of the state.
        generator: draws the first frame.

    Returns:
        Nats per token; −∞ for a direction that is mapped to zero.
    """
    count = min(count, steps[0].size)
    frame, _ = torch.linalg.qr(_normal(count, steps[0], generator).T)
    sums = frame.new_zeros(count)
    turning = len(steps) // 2
    for index, step in enumerate(steps):
        frame, stretched = torch.linalg.qr(step.product(frame.T).T)
        if index >= turning:
            sums += stretched.diagonal().abs().log()
    return sorted((sums / (len(steps) - turning)).tolist(), reverse=True)


def flatten(state: PyTree) -> Tensor:
    """Returns all entries of a state, `(b, n)`."""
    return torch.cat([leaf.flatten(1) for _, leaf in leaves(state)], dim=1)


def unflatten(flat: Tensor, like: PyTree) -> PyTree:
    """Inverts `flatten` for states with the shapes of `like`."""
    sizes = [leaf[0].numel() for _, leaf in leaves(like)]
    parts = iter(flat.split(sizes, dim=1))
    return tree_map(lambda leaf: next(parts).reshape(len(flat), *leaf.shape[1:]), like)


def _normal(rows: int, step: Step, generator: torch.Generator) -> Tensor:
    # Drawn on the generator's device, so that every device starts from the same vectors.
    drawn = torch.randn(
        rows, step.size, generator=generator, dtype=step.start.dtype, device=generator.device
    )
    return drawn.to(step.start.device)
