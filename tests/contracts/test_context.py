"""Several processes with shares of the rows compute what one process computes of the whole rows.

Outputs, final states and all gradients, to 1e-10 in float64, for every cell and mitigation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.inference.scoring import token_losses
from longrnn.mitigations import Mitigated
from longrnn.mixers import MIXERS
from longrnn.models import RecurrentLM
from longrnn.models.context import ContextGroup, check_divisible
from longrnn.positions import POSITIONS
from longrnn.state import detach, leaves, reset, tree_map
from tests.context import (
    Pool,
    built,
    joined,
    read_together,
    share_outcome,
    whole_outcome,
    without_turns,
)
from tests.contracts.builders import (
    DEFINED,
    MITIGATION_OPTIONS,
    MIXER_SPECS,
    assert_same,
    build_model,
    mitigation_spec,
    random_start,
    random_state,
    random_tokens,
    recurrent,
    spec_id,
)

pytestmark = pytest.mark.core

# Segments of shares: very unequal ones, one process with a single token, two without any.
CUTS = ([0, 1, 3, 130, 200], [200, 230, 230, 230, 260])
FEWER = ([0, 1, 3, 70, 90], [90, 110, 110, 110, 120])
Cuts = Sequence[Sequence[int]]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("context"))
    yield pool
    pool.close()


def check(
    pool: Pool,
    description: dict[str, Any],
    cuts: Cuts,
    rows: int = 2,
    work: Callable[..., Any] = share_outcome,
    masks: dict[str, Tensor] | None = None,
) -> None:
    """Compares the processes with one process, from a random state."""
    model = built(description)
    start = random_start if isinstance(model, Mitigated) else random_state
    state = start(model, rows)  # type: ignore[arg-type]
    tokens = random_tokens(rows, cuts[-1][-1])
    given = (description, tokens, state, cuts, masks or {})
    found = pool.run(work, len(cuts[0]) - 1, *given)
    assert_same(joined(found), whole_outcome(*given), torch.float64)


@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_every_cell(spec: dict[str, Any], pool: Pool) -> None:
    """Segments with carried states, through which gradients flow."""
    check(pool, {"mixer": spec, "position": "sinusoidal"}, CUTS)


@pytest.mark.parametrize(("mitigation", "mixer"), DEFINED, ids=spec_id)
def test_every_mitigation_of_every_cell(
    mitigation: dict[str, Any], mixer: dict[str, Any], pool: Pool
) -> None:
    """Also mitigations that remember tokens, or limit a norm."""
    check(pool, {"mixer": mixer, "mitigations": [mitigation]}, FEWER)


# A cell and its mitigations.
CHAINS = [
    ["mamba2", "scale_delta", "power_decay", "token_filter", "forget_more", "state_norm"],
    ["mamba2", "scale_decay", "token_filter", "forget_more", "sliding_window"],
    ["gru", "forget_more", "state_norm"],
    ["lstm", "sliding_window", "forget_more"],
]


@pytest.mark.parametrize("chain", CHAINS, ids="+".join)
def test_chains_of_mitigations(chain: list[str], pool: Pool) -> None:
    """Multipliers before a limit or a window, in segments whose states are carried."""
    mixer, *kinds = chain
    check(pool, {"mixer": mixer, "mitigations": [mitigation_spec(kind) for kind in kinds]}, FEWER)


@pytest.mark.parametrize("mixer", MIXERS)
def test_packed_and_padded_rows(mixer: str, pool: Pool) -> None:
    """Documents begin at the borders of shares and inside, and whole shares are padding."""
    tokens = torch.arange(260)
    is_token = torch.stack([tokens < 190, (tokens % 7 > 0) & (tokens < 130), tokens >= 0])
    starts = torch.zeros(3, 260, dtype=torch.bool)
    for row, start in ((0, 0), (0, 1), (0, 100), (1, 3), (2, 129), (2, 130), (2, 215), (2, 259)):
        starts[row, start] = True
    starts &= is_token
    masks = {"is_token": is_token, "is_document_start": starts}
    check(pool, {"mixer": mixer, "position": "sinusoidal"}, CUTS, 3, masks=masks)


@pytest.mark.parametrize("mixer", ["mamba2", "gru"])
def test_a_document_does_not_see_the_state_before_it(mixer: str, pool: Pool) -> None:
    """Outputs and gradients are finite although the state before the document is not."""
    starts = torch.zeros(2, 100, dtype=torch.bool)
    starts[0, 0] = starts[1, 60] = True
    model = built({"mixer": mixer})
    assert isinstance(model, RecurrentLM)
    state = random_state(model, 2)
    nan = tree_map(lambda leaf: torch.full_like(leaf, torch.nan), state.layers)
    layers = reset(state.layers, nan, torch.tensor([True, False]))
    given = ({"mixer": mixer}, random_tokens(2, 100), state._replace(layers=layers), [[0, 50, 100]])
    masks = {"is_document_start": starts}
    found = joined(pool.run(share_outcome, 2, *given, masks))
    assert all(value.isfinite().all() for value in found.values())
    assert_same(found, whole_outcome(*given, masks), torch.float64)


@pytest.mark.parametrize("every", ["block", "segment"])
@pytest.mark.parametrize("mixer", ["mamba2", "lstm"])
def test_activations_that_are_computed_again(mixer: str, every: str, pool: Pool) -> None:
    """Gradient checkpointing repeats the exchanges of the forward pass in the backward pass."""
    check(pool, {"mixer": mixer, "gradient_checkpointing": every}, FEWER)


MULTIPLIERS = [{"kind": n, **MITIGATION_OPTIONS[n]} for n in ("forget_more", "token_filter")]
WINDOWED = [{"kind": "sliding_window", "window": 3}, {"kind": "scale_delta", "scale": 0.7}]


@pytest.mark.parametrize(
    ("mitigations", "cuts"),
    [
        ([], CUTS),
        (MULTIPLIERS, CUTS),
        ([{"kind": "state_norm", "threshold": 0.5, "layers": []}], CUTS),
        (WINDOWED, ([0, 50, 64, 200], [200, 212, 231, 233])),
    ],
    ids=["plain", "multipliers", "norm-of-no-layer", "window"],
)
def test_shares_run_at_the_same_time(
    mitigations: list[dict[str, Any]], cuts: Cuts, pool: Pool
) -> None:
    """No process of a scanning cell waits for another, unless an edit requires it."""
    check(pool, {"mixer": "mamba2", "mitigations": mitigations}, cuts, work=without_turns)


@pytest.mark.parametrize(
    ("window", "cuts"),
    [
        (1, ([0, 9, 30], [30, 60, 61])),
        (70, ([0, 200, 400, 407], [407, 610, 900, 901])),
        pytest.param(200, ([0, 330, 700, 1100], [1100, 1430, 1800, 1900]), marks=pytest.mark.slow),
        pytest.param(1000, ([0, 2100, 4300], [4300, 6400, 8200]), marks=pytest.mark.slow),
    ],
)
def test_windows_of_any_length(window: int, cuts: Cuts, pool: Pool) -> None:
    """Each process reads the end of the share before; rows may be at different phases."""
    description = {
        "mixer": "mamba2",
        "mitigations": [{"kind": "sliding_window", "window": window}],
        "n_layers": 1,
    }
    model = built(description)
    assert isinstance(model, Mitigated)
    _, state = model(random_tokens(2, 5), random_start(model, 2))
    state = reset(detach(state), model.init_state(2), torch.tensor([False, True]))
    given = (description, random_tokens(2, cuts[-1][-1]), state, cuts, {})
    found = pool.run(without_turns, len(cuts[0]) - 1, *given)
    assert_same(joined(found), whole_outcome(*given), torch.float64)


def test_a_group_of_one_process(pool: Pool) -> None:
    """One share is the whole rows."""
    check(pool, {"mixer": "mamba2"}, [[0, 70], [70, 75]])


@pytest.mark.parametrize("position", POSITIONS)
def test_positions_continue_across_shares(position: str, pool: Pool) -> None:
    """Every share begins at the position at which the one before it ends."""
    check(pool, {"mixer": "rnn", "position": position, "block": "plain"}, FEWER)


def test_a_model_that_cannot_be_divided_is_refused() -> None:
    """A model with other layers than recurrent ones has no state between shares."""
    group = ContextGroup(None, 0, 2)
    hybrid = Mitigated(build_model(), []).requires_grad_(False)
    hybrid.model = _Other(recurrent(hybrid))  # type: ignore[assignment]
    with pytest.raises(UserError):
        hybrid(random_tokens(1, 3), context=group)


class _Other(torch.nn.Module):
    """A model that is not a `RecurrentLM`, such as a hybrid."""

    def __init__(self, model: RecurrentLM) -> None:
        super().__init__()
        self.whole = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.whole, name)


def check_prefill(
    pool: Pool, description: dict[str, Any], length: int, rows: int, width: int
) -> None:
    """Compares logits, state and losses of a text that four processes read with those of one."""
    tokens = random_tokens(rows, length)
    found = pool.run(read_together, 4, description, tokens, width)
    model = built(description)
    with torch.no_grad():
        (logits, state), nats = model(tokens[:, :-1], keep=1), list(token_losses(model, tokens))
    whole = {"logits": logits[:, 0], "nats": torch.cat([part for _, part in nats], 1)}
    whole |= {name: leaf for name, leaf in leaves(state) if "tag" not in name}
    for outcome in found:
        assert_same(outcome, whole, torch.float64)


@pytest.mark.parametrize(
    "description",
    [
        {"mixer": "mamba2"},
        {"mixer": "gru", "position": "sinusoidal"},
        {"mixer": "mamba2", "mitigations": [{"kind": "sliding_window", "window": 5}]},
        {"mixer": "mamba2", "mitigations": [{"kind": "state_norm", "threshold": 0.5}]},
    ],
    ids=["mamba2", "gru", "window", "norm"],
)
def test_a_text_is_read_in_pieces_by_all_processes(description: dict[str, Any], pool: Pool) -> None:
    """Also where the last piece has fewer tokens than there are processes."""
    check_prefill(pool, description, 32 * 4 * 2 + 3, 2, 32)


@pytest.mark.slow
def test_a_text_of_262144_tokens(pool: Pool) -> None:
    """Four processes and one compute the same of a long text."""
    check_prefill(pool, {"mixer": "mamba2"}, 2**18 + 1, 1, 2**14)


def test_a_backend_that_refuses_some_inputs_is_refused_for_shares() -> None:
    """One process would refuse its share while the others wait for it."""
    model = build_model("mamba2")
    check_divisible(model)
    model.mixers[0].reads_device = True
    with pytest.raises(UserError, match="backend"):
        check_divisible(model)
