"""Starts of documents from `cu_seqlens` and from position ids, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longrnn.errors import UserError
from longrnn.hf.packing import document_starts, document_starts_of_positions


def test_starts_from_bounds() -> None:
    """The token at each bound except the last one; an empty document has no token."""
    expected = [[True, False, False, True, False]]
    assert document_starts([0, 3, 5], 5).tolist() == expected
    assert document_starts(torch.tensor([0, 0, 3, 3, 5, 5], dtype=torch.int32), 5).tolist() == (
        expected
    )
    assert document_starts([0], 0).tolist() == [[]]


def test_starts_from_positions() -> None:
    """Where the position is 0; the first row continues a document."""
    found = document_starts_of_positions(torch.tensor([[7, 8, 0, 1, 0], [0, 0, 1, 2, 3]]))
    assert found.tolist() == [
        [False, False, True, False, True],
        [True, True, False, False, False],
    ]


@pytest.mark.parametrize(
    ("bounds", "length"),
    [
        ([0, 3, 5], 6),
        ([1, 5], 5),
        ([0, 4, 3, 5], 5),
        ([0.0, 5.0], 5),
        ([[0, 5]], 5),
        ([], 0),
    ],
)
def test_bounds_that_do_not_fit_are_refused(bounds: Any, length: int) -> None:
    """Bounds of another row, or lengths in their place."""
    with pytest.raises(UserError, match="cu_seqlens"):
        document_starts(bounds, length)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.tensor([[0, 1, 3]]), "position"),
        (torch.tensor([[0, 1], [4, 4]]), "position"),
        (torch.tensor([[-1, 0]]), "position"),
    ],
)
def test_positions_that_do_not_follow_are_refused(positions: torch.Tensor, message: str) -> None:
    """Within a document positions grow by 1."""
    with pytest.raises(UserError, match=message):
        document_starts_of_positions(positions)
