"""Spectra and Lyapunov exponents of systems with known answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.cells import RNN, Mamba2
from longrnn.diagnostics import jacobian
from longrnn.diagnostics.jacobian import (
    Step,
    arnoldi,
    flatten,
    golub_kahan,
    lyapunov,
    spectrum,
    unflatten,
)
from tests.contracts.builders import (
    D_MODEL,
    MIXER_SPECS,
    assert_near,
    build_mixer,
    generator,
    random_tree,
    spec_id,
)


def step_of(spec: dict[str, Any], seed: int = 0) -> Step:
    mixer = build_mixer(spec)
    x = random_tree(torch.empty(1, 1, D_MODEL + 2, dtype=torch.float64), seed)
    return Step(mixer, x, random_tree(mixer.init_state(1), seed + 1))


def linear(matrix: Tensor) -> Step:
    """Return h ← W h."""
    size = len(matrix)
    mixer = RNN(2, size, nonlinearity="identity").double()
    _, recurrent, _, _ = mixer.cell.all_weights[0]
    recurrent.data.copy_(matrix)
    return Step(mixer, torch.zeros(1, 1, 2, dtype=torch.float64), mixer.init_state(1))


def rotation(size: int) -> Tensor:
    drawn = torch.randn(size, size, generator=generator(3), dtype=torch.float64)
    return torch.linalg.qr(drawn)[0]


@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_the_matrix_is_that_of_autograd(spec: dict[str, Any]) -> None:
    """The Jacobian of every cell equals that of a full autograd computation."""
    step = step_of(spec)

    def fused(flat: Tensor) -> Tensor:
        state = unflatten(flat[None], step.like)
        return flatten(step.mixer(step.x, state)[1])[0]

    expected = torch.autograd.functional.jacobian(fused, step.start[0])
    assert isinstance(expected, Tensor)
    assert_near(step.matrix(), expected, 1e-10)
    vectors = torch.randn(3, step.size, generator=generator(5), dtype=torch.float64)
    assert_near(step.product(vectors), vectors @ expected.T, 1e-10)
    assert_near(step.transposed(vectors), vectors @ expected, 1e-10)


@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_power_methods_agree_with_the_matrix(
    spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Krylov methods give the values of the dense matrix."""
    step = step_of(spec)
    # About as many steps as the small states have numbers: then there is nothing to converge.
    monkeypatch.setattr(jacobian, "KRYLOV", min(step.size, 60))
    matrix = step.matrix()
    singular = torch.linalg.svdvals(matrix)
    found = golub_kahan(step, generator(1))
    assert found[0] == pytest.approx(float(singular[0]), rel=1e-8)
    assert arnoldi(step, generator(1)) == pytest.approx(
        float(torch.linalg.eigvals(matrix).abs().max()), rel=1e-5
    )


def test_a_large_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The complex eigenvalue pair ±0.9 i of largest modulus is found."""
    blocks = [
        torch.tensor([[0.0, -0.9], [0.9, 0.0]], dtype=torch.float64),
        *(torch.full((1, 1), 0.5 / (k + 1), dtype=torch.float64) for k in range(98)),
    ]
    frame = rotation(100)
    matrix = frame @ torch.block_diag(*blocks) @ frame.T
    monkeypatch.setattr(jacobian, "DENSE", 10)
    found = spectrum(linear(matrix), generator(0))
    assert found.method == "krylov"
    assert found.radius == pytest.approx(0.9, abs=1e-8)
    assert found.singular[0] == pytest.approx(0.9, abs=1e-8)


@torch.no_grad()
def decays_of(mixer: Mamba2, x: Tensor) -> Tensor:
    """Return exp(dt A), `(h,)`, explicitly."""
    dt = mixer.in_proj(x)[0, 0, -mixer.n_heads :]
    return (torch.nn.functional.softplus(dt + mixer.dt_bias) * mixer.rates()).exp()


@pytest.mark.parametrize("head_dim", [4, 16])
def test_mamba2_decays_are_its_eigenvalues(head_dim: int) -> None:
    """The spectrum of a Mamba-2 is its decays: the inputs of the convolution only shift."""
    mixer = build_mixer({"kind": "mamba2", "d_state": 5, "head_dim": head_dim})
    assert isinstance(mixer, Mamba2)
    x = random_tree(torch.empty(1, 1, D_MODEL + 2, dtype=torch.float64), 4)
    decays = decays_of(mixer, x)
    step = Step(mixer, x, random_tree(mixer.init_state(1), 2))
    found = spectrum(step, generator(0))
    # A nilpotent block is not kept from a little noise around 0, the decays are far from it.
    assert found.radius == pytest.approx(float(decays.max()), abs=1e-8)
    if len(decays) == 1:  # two decays that are near each other take longer to be told apart
        expected = [float(decays.log())] * 3
        assert lyapunov([step] * 20, 3, generator(0)) == pytest.approx(expected, abs=1e-6)


def test_a_rotation_keeps_everything() -> None:
    """Radius, singular values and exponents of an orthogonal recurrence are exact."""
    step = linear(rotation(12))
    found = spectrum(step, generator(0))
    assert found.radius == pytest.approx(1, abs=1e-12)
    assert found.singular == pytest.approx([1.0] * 8, abs=1e-12)
    assert lyapunov([step] * 40, 12, generator(0)) == pytest.approx([0.0] * 12, abs=1e-12)


def test_exponents_of_a_diagonal_system() -> None:
    """Exponents of a constant matrix are the logarithms of its eigenvalues, in descending order."""
    rates = torch.tensor([0.9, 0.5, -0.25, 1.1], dtype=torch.float64)
    found = lyapunov([linear(torch.diag(rates))] * 100, 9, generator(0))
    expected = sorted(rates.abs().log().tolist(), reverse=True)
    assert found == pytest.approx(expected, abs=1e-6)


def test_exponents_of_changing_steps() -> None:
    """Exponents of a product of different matrices are those of the product."""
    one, other = (torch.diag(torch.tensor(d, dtype=torch.float64)) for d in ([2, 0.1], [0.5, 0.3]))
    found = lyapunov([linear(one), linear(other)] * 40, 2, generator(0))
    assert found == pytest.approx([0.0, float(torch.tensor(0.03).log()) / 2], abs=1e-6)


def test_a_direction_that_is_lost() -> None:
    """A lost direction has an exponent of −∞, and the others are finite."""
    found = lyapunov([linear(torch.diag(torch.tensor([0.5, 0.0]).double()))] * 8, 2, generator(0))
    assert found[0] == pytest.approx(-0.6931, abs=1e-3)
    assert found[1] < -20
