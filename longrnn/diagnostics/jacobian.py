"""The Jacobian of one step of a cell: its spectrum, its singular values, and Lyapunov exponents.

What is differentiated: the state of one layer after a token, with respect to that layer's state
before it, the whole state as one flat vector (h of an RNN and a GRU, h and c of an LSTM, the inputs
of the convolution and the p × n states of all heads of a Mamba-2), at the input that the layer
reads there. Within a token nothing flows from a layer to itself through others, so these blocks are
the diagonal of the block triangular Jacobian of the whole model: its eigenvalues are theirs, and
the Lyapunov exponents of the product over tokens are theirs.

Notable choices:
- Rows of a batch are independent. A Jacobian is computed by one step on a batch of copies of the
  state, one per row of the matrix, and one backward pass, which is exact for every cell.
- A product with the Jacobian (not its transpose) is the derivative of the backward pass, which is
  linear in the vector that it carries.
- For states of up to DENSE entries the matrix is computed explicitly. For larger states, its
  eigenvalue of largest modulus is computed by Arnoldi iteration and its largest singular values by
  Golub–Kahan bidiagonalisation, both with KRYLOV steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.cells import Cell, Edit
from longrnn.state import PyTree, leaves, tree_map

DENSE = 1024
KRYLOV = 48
# Singular values that are kept.
KEPT = 8


class Spectrum(NamedTuple):
    """The spectrum of the Jacobian of one step.

    Attributes:
        radius: largest modulus of an eigenvalue.
        singular: the largest singular values, descending.
        method: `dense`, or `krylov` if the matrix is too large to be computed explicitly.
    """

    radius: float
    singular: list[float]
    method: str


class Step:
    """One step of a cell as a function of its flat state, and its Jacobian as an operator.

    Args:
        cell: in float64, with the backend `torch`.
        x: `(1, 1, d_input)`, the input.
        state: of one row, before the token.
    """

    def __init__(self, cell: Cell, x: Tensor, state: PyTree) -> None:
        self.cell, self.x = cell, x.detach()
        self.start = flatten(state).detach()  # (1, n)
        self.like = state
        self.size = self.start.shape[1]

    def after(self, flat: Tensor) -> Tensor:
        """Return flat states after the token, `(b, n)`, from flat states before it."""
        # An edit makes the cells of torch.nn run in plain operations, differentiable twice.
        x = self.x.expand(len(flat), -1, -1)
        return flatten(self.cell(x, unflatten(flat, self.like), Edit())[1])

    def transposed(self, vectors: Tensor) -> Tensor:
        """Return J^T v for each row v, `(b, n)`."""
        before = self.start.repeat(len(vectors), 1).requires_grad_()
        (found,) = torch.autograd.grad(self.after(before), before, vectors)
        return found

    def product(self, vectors: Tensor) -> Tensor:
        """Return J v for each row v, `(b, n)`."""
        before = self.start.repeat(len(vectors), 1).requires_grad_()
        probe = torch.zeros_like(before).requires_grad_()
        (pulled,) = torch.autograd.grad(self.after(before), before, probe, create_graph=True)
        (found,) = torch.autograd.grad(pulled, probe, vectors)
        return found

    def matrix(self) -> Tensor:
        """Return J, `(n, n)`: entry (i, j) is ∂ after_i / ∂ before_j."""
        identity = torch.eye(self.size, dtype=self.start.dtype, device=self.start.device)
        return self.transposed(identity)


def spectrum(step: Step, generator: torch.Generator) -> Spectrum:
    """Return the spectral radius and largest singular values of one step."""
    if step.size <= DENSE:
        matrix = step.matrix()
        singular = torch.linalg.svdvals(matrix)[:KEPT].tolist()
        return Spectrum(_radius(matrix), singular, "dense")
    singular = golub_kahan(step, generator)[:KEPT]
    return Spectrum(arnoldi(step, generator), singular, "krylov")


def arnoldi(step: Step, generator: torch.Generator) -> float:
    """Return the largest modulus of the eigenvalues in a Krylov space of KRYLOV vectors."""
    basis = [_unit(_normal(1, step, generator))]
    columns = step.start.new_zeros(KRYLOV + 1, KRYLOV)
    for j in range(KRYLOV):
        vector = step.product(basis[-1])
        size = float(vector.norm())
        stacked = torch.cat(basis)
        for _ in range(2):  # twice is enough for orthogonality to rounding
            weights = vector @ stacked.T
            vector = vector - weights @ stacked
            columns[: j + 1, j] += weights[0]
        left = float(vector.norm())
        if left <= 1e-13 * max(size, 1e-300):  # the space is closed: its eigenvalues are exact
            return _radius(columns[: j + 1, : j + 1])
        columns[j + 1, j] = left
        basis.append(vector / left)
    return _radius(columns[:KRYLOV, :KRYLOV])


def golub_kahan(step: Step, generator: torch.Generator) -> list[float]:
    """Return the largest singular values, descending.

    Bidiagonalisation with full reorthogonalisation. A value with multiplicity above 1 is found at
    least once.
    """
    right = [_unit(_normal(1, step, generator))]
    left: list[Tensor] = []
    diagonal: list[float] = []
    above: list[float] = []
    largest = 0.0
    for _ in range(KRYLOV):
        image = _cleared(step.product(right[-1]), left)
        size = float(image.norm())
        largest = max(largest, size)
        if size <= 1e-13 * largest or size == 0.0:
            break
        diagonal.append(size)
        left.append(image / size)
        back = _cleared(step.transposed(left[-1]), right)
        size = float(back.norm())
        if size <= 1e-13 * largest:
            break
        above.append(size)
        right.append(back / size)
    if not diagonal:
        return [0.0]
    # As many rows as left vectors; one column more where the last right vector was used.
    bidiagonal = step.start.new_zeros(len(diagonal), len(diagonal) + 1)
    bidiagonal.diagonal().copy_(step.start.new_tensor(diagonal))
    bidiagonal.diagonal(1)[: len(above)] = step.start.new_tensor(above)
    return torch.linalg.svdvals(bidiagonal).tolist()


def lyapunov(
    steps: Sequence[Step],
    count: int,
    generator: torch.Generator,
    advance: Callable[[], None] | None = None,
) -> list[float]:
    """Return the largest Lyapunov exponents of the product of the steps, descending.

    By the QR method: an orthonormal frame is multiplied by each step's Jacobian and orthonormalised
    again; an exponent is the mean logarithm of the stretching of its vector (Benettin et al.,
    1980). The first half of the steps only aligns the frame; over T steps, directions whose
    exponents differ by less than about 1/T cannot be separated.

    Args:
        steps: of consecutive tokens.
        count: number of exponents, limited to the size of the state.
        generator: draws the first frame.
        advance: called after each step.

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
        if advance is not None:
            advance()
    return sorted((sums / (len(steps) - turning)).tolist(), reverse=True)


def flatten(state: PyTree) -> Tensor:
    """Return all entries of a state, `(b, n)`."""
    return torch.cat([leaf.flatten(1) for _, leaf in leaves(state)], dim=1)


def unflatten(flat: Tensor, like: PyTree) -> PyTree:
    """Invert `flatten` for states with the shapes of `like`."""
    sizes = [leaf[0].numel() for _, leaf in leaves(like)]
    parts = iter(flat.split(sizes, dim=1))
    return tree_map(lambda leaf: next(parts).reshape(len(flat), *leaf.shape[1:]), like)


def _radius(matrix: Tensor) -> float:
    return float(torch.linalg.eigvals(matrix).abs().max())


def _normal(rows: int, step: Step, generator: torch.Generator) -> Tensor:
    # Drawn on the generator's device, so that every device starts from the same vectors.
    drawn = torch.randn(
        rows, step.size, generator=generator, dtype=step.start.dtype, device=generator.device
    )
    return drawn.to(step.start.device)


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm()


def _cleared(vector: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return `vector` without its components along orthonormal `others`."""
    if not others:
        return vector
    stacked = torch.cat(list(others))
    for _ in range(2):
        vector = vector - (vector @ stacked.T) @ stacked
    return vector
