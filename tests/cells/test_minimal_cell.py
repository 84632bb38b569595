"""A cell with nothing but the methods that CONTRIBUTING.md lists works, without mitigations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from longrnn import Mitigated, generate, mitigation
from longrnn.cells import MIXERS, Cell, Edit
from longrnn.errors import UserError
from longrnn.mitigations import MITIGATIONS
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.state import PyTree
from tests.contracts.builders import MITIGATION_OPTIONS, VOCAB, random_tokens


class MeanState(NamedTuple):
    """`h`: `(b, d)`."""

    h: Tensor


class Mean(Cell):
    """h ← (h + W x) / 2."""

    def __init__(self, d_input: int, d_model: int) -> None:
        super().__init__(d_input, d_model)
        self.project = nn.Linear(d_input, d_model)

    def state_like(self) -> MeanState:
        weight = self.project.weight
        return MeanState(torch.empty(self.d_model, dtype=weight.dtype, device="meta"))

    def run(
        self, x: Tensor, state: MeanState, edit: Edit | None, carry: PyTree
    ) -> tuple[Tensor, MeanState, PyTree]:
        outputs = [state.h]
        for u in self.project(x).unbind(1):
            outputs.append((outputs[-1] + u) / 2)
        return torch.stack(outputs[1:], dim=1), MeanState(outputs[-1]), carry


@pytest.fixture
def model() -> Iterator[RecurrentLM]:
    MIXERS.register("mean")(Mean)
    try:
        yield RecurrentLM(RecurrentConfig(vocab_size=VOCAB, d_model=8, mixer={"kind": "mean"}))
    finally:
        del MIXERS._members["mean"]


def test_it_reads_pieces_and_generates(model: RecurrentLM) -> None:
    """Any split gives the same."""
    tokens = random_tokens(3, 9)
    whole = model(tokens)
    before = model(tokens[:, :4]).state
    logits, _ = model(tokens[:, 4:], before)
    torch.testing.assert_close(logits[:, -1], whole.logits[:, -1])
    assert generate(model, tokens, max_new_tokens=3).state.position.tolist() == [12] * 3


@pytest.mark.parametrize("kind", [kind for kind in MITIGATIONS if kind != "none"])
def test_no_mitigation_is_silently_left_out(model: RecurrentLM, kind: str) -> None:
    """A cell that calls no hooks is refused under every mitigation, with the reason."""
    member = mitigation({"kind": kind, **MITIGATION_OPTIONS.get(kind, {})})
    with pytest.raises(UserError, match=naming(kind)):
        Mitigated(model, member)
