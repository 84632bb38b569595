"""RNN, GRU and LSTM equal those of `torch.nn`, with the fused kernel and one token at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longrnn.errors import UserError
from longrnn.mixers import MIXERS, Edit, EditedState, Mixer, Update
from longrnn.mixers.stepwise import StepwiseMixer
from tests.contracts.builders import (
    D_MODEL,
    assert_same,
    build_mixer,
    mixer_outcome,
    mixer_spec,
    random_tree,
    spec_id,
)

pytestmark = pytest.mark.core

BATCH, TIME, D_INPUT = 3, 40, D_MODEL + 2

PEERS: list[tuple[dict[str, Any], nn.RNNBase]] = [
    ({"kind": "rnn"}, nn.RNN(D_INPUT, D_MODEL, batch_first=True)),
    (
        {"kind": "rnn", "nonlinearity": "relu"},
        nn.RNN(D_INPUT, D_MODEL, nonlinearity="relu", batch_first=True),
    ),
    ({"kind": "gru"}, nn.GRU(D_INPUT, D_MODEL, batch_first=True)),
    ({"kind": "lstm"}, nn.LSTM(D_INPUT, D_MODEL, batch_first=True)),
]
STEPWISE = [name for name, member in MIXERS.items() if issubclass(member, StepwiseMixer)]


class PeerMixer(Mixer):
    """A `torch.nn` module with the interface of a mixer."""

    def __init__(self, cell: nn.RNNBase, like: tuple[Tensor, ...]) -> None:
        super().__init__(D_INPUT, D_MODEL)
        self.cell, self.like = cell, like

    def state_like(self) -> tuple[Tensor, ...]:
        return self.like

    def run(self, x: Tensor, state: tuple[Tensor, ...], edit: Edit | None, carry: Any):
        given = [leaf[None] for leaf in state]
        y, after = self.cell(x, tuple(given) if len(given) > 1 else given[0])
        after = after if isinstance(after, tuple) else (after,)
        return y, type(state)(*(leaf[0] for leaf in after)), carry


def draw(mixer: Mixer, dtype: torch.dtype) -> tuple[Tensor, Any]:
    return (
        random_tree(torch.empty(BATCH, TIME, D_INPUT, dtype=dtype), 1),
        random_tree(mixer.init_state(BATCH), 2),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=spec_id)
@pytest.mark.parametrize("edit", [None, Edit()], ids=["fused", "stepwise"])
@pytest.mark.parametrize(("spec", "cell"), PEERS, ids=spec_id)
def test_equals_torch(
    spec: dict[str, Any], cell: nn.RNNBase, edit: Edit | None, dtype: torch.dtype
) -> None:
    """The same weights give the same outputs, states and gradients."""
    mixer = build_mixer(spec, dtype)
    peer = PeerMixer(cell.to(dtype), mixer.state_like())
    cell.load_state_dict(mixer.cell.state_dict())  # type: ignore[union-attr]
    x, state = draw(mixer, dtype)
    expected = mixer_outcome(peer, x, state, [TIME])
    assert_same(mixer_outcome(mixer, x, state, [TIME], edit), expected, dtype)


@pytest.mark.parametrize("kind", STEPWISE)
def test_stepwise_equals_fused(kind: str) -> None:
    """An edit that changes nothing gives the results of the fused kernel."""
    mixer = build_mixer(mixer_spec(kind))
    x, state = draw(mixer, torch.float64)
    fused = mixer_outcome(mixer, x, state, [TIME])
    assert_same(mixer_outcome(mixer, x, state, [TIME], Edit()), fused, torch.float64)


class Halve(Edit):
    """Halves `keep` and `add` of each token, and collects its arguments in the carry."""

    def edit_update(self, update: Update, carry: Any):
        keep = None if update.keep is None else update.keep / 2
        half = Update(add=update.add / 2, keep=keep)
        return half, (*carry, update)

    def advance(self, memory: Tensor, update: Update, carry: Any):
        return update.apply(memory), (*carry[:-1], (memory, carry[-1]))


@pytest.mark.parametrize("kind", STEPWISE)
def test_an_edit_sees_every_token(kind: str) -> None:
    """The hooks get memory and update of each token, and their result becomes the state."""
    mixer = build_mixer(mixer_spec(kind))
    assert isinstance(mixer, StepwiseMixer)
    x, state = draw(mixer, torch.float64)
    runs = [mixer(x[:, :t], EditedState(state, ()), Halve()) for t in (1, 2, 3)]
    reached = [state, *(after.state for _, after in runs)]
    y, final = runs[-1]
    memory = mixer.memory(state)
    assert len(final.carry) == 3
    for t, (before, update) in enumerate(final.carry):
        torch.testing.assert_close(before, memory, rtol=1e-12, atol=1e-12)
        kept = 0 if update.keep is None else update.keep * memory
        memory = (update.add + kept) / 2
        _, unedited = mixer(x[:, t : t + 1], reached[t])
        torch.testing.assert_close(2 * memory, mixer.memory(unedited), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mixer.memory(reached[t + 1]), memory, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(y[:, t], reached[t + 1].h, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "message"), [("Tanh", "tanh"), ("", "identity")])
def test_an_unknown_nonlinearity_is_refused(kind: str, message: str) -> None:
    """The error suggests the nearest name, or lists all."""
    with pytest.raises(UserError, match=message):
        build_mixer({"kind": "rnn", "nonlinearity": kind})
