"""Positional encodings equal their formulas, refuse positions past their end, and use the state."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.positions import POSITIONS
from tests.contracts.builders import (
    D_MODEL,
    build_model,
    generator,
    position_spec,
    random_tokens,
)
from tests.refusals import naming


def build(kind: str, **options: object) -> Any:
    return POSITIONS.build({**position_spec(kind), **options}, D_MODEL)


def vectors(time: int, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.randn((2, time, D_MODEL), generator=generator(0), dtype=torch.float64)
    return drawn.to(dtype)


def positions_from(start: int, time: int) -> Tensor:
    return (start + torch.arange(time)).expand(2, time)


def sinusoid(position: int) -> Tensor:
    """The encoding of one position, computed with the standard library."""
    half = D_MODEL // 2
    angles = [position / 10000 ** (2 * k / D_MODEL) for k in range(half)]
    values = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return torch.tensor(values, dtype=torch.float64) / math.sqrt(half)


@pytest.mark.parametrize("start", [0, 7, 10**6, 10**9])
def test_sinusoidal_equals_its_formula(start: int) -> None:
    """Also at positions where float32 would lose the phase."""
    x, positions = vectors(5), positions_from(start, 5)
    encoding = build("sinusoidal").encode(x, positions)
    expected = torch.stack([sinusoid(start + t) for t in range(5)]).expand(2, 5, D_MODEL)
    torch.testing.assert_close(encoding, expected, rtol=0, atol=1e-6 if start > 10**6 else 1e-9)
    torch.testing.assert_close(encoding.norm(dim=-1), torch.ones(2, 5, dtype=torch.float64))
    narrow = build("sinusoidal").encode(x.float(), positions)
    torch.testing.assert_close(narrow, expected.float(), rtol=0, atol=1e-6)


def test_sinusoidal_needs_an_even_width() -> None:
    with pytest.raises(UserError, match=naming("d_model", 7)):
        POSITIONS.build({"kind": "sinusoidal"}, 7)


@pytest.mark.parametrize("kind", ["learned", "random"])
def test_a_table_gives_the_row_of_each_position(kind: str) -> None:
    """Positions may differ between the rows of a batch; only learned rows are trained."""
    encoding = build(kind, max_length=20)
    x = vectors(3, torch.float32)
    positions = torch.tensor([[0, 5, 19], [3, 3, 2]])
    found = encoding.encode(x, positions)
    assert torch.equal(found, encoding.table[positions])
    assert found.requires_grad == (kind == "learned")


@pytest.mark.parametrize("kind", ["learned", "random"])
def test_a_position_past_the_end_is_refused(kind: str) -> None:
    encoding = build(kind, max_length=20)
    encoding(vectors(20), positions_from(0, 20))
    with pytest.raises(UserError, match=naming("position 20", 21)):
        encoding(vectors(20), positions_from(1, 20))
    model: Any = build_model("rnn", kind)
    state = model.init_state(1)
    end = model.position.table.shape[0]
    state = model(random_tokens(1, 2), state._replace(position=torch.tensor([end - 2]))).state
    with pytest.raises(UserError, match=naming("position", end)):
        model(random_tokens(1, 1), state)


def test_random_is_fixed() -> None:
    """Rows have unit norm, depend on the seed alone, are not trained, and are saved."""
    before = torch.get_rng_state()
    encoding, same, other = build("random"), build("random"), build("random", seed=1)
    torch.testing.assert_close(encoding.table.norm(dim=-1), torch.ones(len(encoding.table)))
    assert torch.equal(encoding.table, same.table)
    assert not torch.equal(encoding.table, other.table)
    assert not list(encoding.parameters())
    assert "table" in encoding.state_dict()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [kind for kind in POSITIONS if kind != "none"])
def test_combine(kind: str) -> None:
    """`concat` appends the encoding and doubles the width; `add` adds it."""
    x, positions = vectors(4), positions_from(2, 4)
    joined, added = build(kind, combine="concat"), build(kind, combine="add")
    added.load_state_dict(joined.state_dict())
    encoding = joined.encode(x, positions)
    assert encoding.shape == x.shape
    assert encoding.dtype == x.dtype
    assert torch.equal(joined(x, positions), torch.cat([x, encoding], -1))
    assert torch.equal(added(x, positions), x + encoding)
    assert (joined.d_output, added.d_output) == (2 * D_MODEL, D_MODEL)
    with pytest.raises(UserError, match=naming("concat", "add")):
        build(kind, combine="multiply")
