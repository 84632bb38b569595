"""Each initialisation has its defining property, and the default changes nothing."""

import pytest
import torch
from torch import Tensor, nn

from longrnn.cells import INITS, MIXERS, RNN, Cell, Mamba2, TorchCell
from longrnn.cells.init import MAX_TIME_SCALE
from longrnn.cells.observe import decay_sums
from longrnn.errors import UserError
from tests.contracts.builders import D_MODEL, assert_trees_equal, mixer_spec
from tests.refusals import naming

DEFINED = {
    "default": set(MIXERS),
    "orthogonal": {"rnn", "gru", "lstm"},
    "identity": {"rnn"},
    "xavier": {"rnn", "gru", "lstm"},
    "long_memory": {"gru", "lstm", "mamba", "mamba2", "mamba3", "gated_deltanet", "kda"},
}
WITH_INIT = [kind for kind in MIXERS if "init" in MIXERS.complete(mixer_spec(kind))]
STEPWISE = [kind for kind, member in MIXERS.items() if issubclass(member, TorchCell)]


def build(kind: str, init: str | None = None) -> Cell:
    torch.manual_seed(0)
    spec = mixer_spec(kind) if init is None else {**mixer_spec(kind), "init": init}
    return MIXERS.build(spec, D_MODEL + 2, D_MODEL)


def blocks(mixer: Cell) -> list[Tensor]:
    """The recurrent matrix of each gate."""
    assert isinstance(mixer, TorchCell)
    return list(mixer.get_parameter("cell.weight_hh_l0").detach().double().split(D_MODEL))


@pytest.mark.parametrize("kind", WITH_INIT)
@pytest.mark.parametrize("init", list(INITS))
def test_each_pair_is_defined_or_refused_with_a_reason(init: str, kind: str) -> None:
    if kind in DEFINED[init]:
        state = build(kind, init).state_dict()
        assert all(value.isfinite().all() for value in state.values())
    else:
        with pytest.raises(UserError, match=naming(init, kind)):
            build(kind, init)


@pytest.mark.parametrize("kind", WITH_INIT)
def test_the_default_draws_no_random_numbers(kind: str) -> None:
    """A seed gives the weights of torch.nn, and the same random numbers afterwards."""
    plain, after = build(kind).state_dict(), torch.rand(1)
    assert_trees_equal(list(build(kind, "default").state_dict().values()), list(plain.values()))
    assert torch.rand(1) == after
    if kind in STEPWISE:
        torch.manual_seed(0)
        peer = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[kind](D_MODEL + 2, D_MODEL)
        assert_trees_equal(list(peer.state_dict().values()), list(plain.values()))
        assert torch.rand(1) == after


@pytest.mark.parametrize("kind", STEPWISE)
def test_orthogonal(kind: str) -> None:
    for block in blocks(build(kind, "orthogonal")):
        torch.testing.assert_close(block @ block.T, torch.eye(D_MODEL).double(), rtol=0, atol=1e-6)


def test_identity() -> None:
    mixer = RNN(D_MODEL, D_MODEL, nonlinearity="relu", init="identity")
    state = mixer.init_state(2)._replace(h=torch.rand(2, D_MODEL))
    y, after = mixer(torch.zeros(2, 5, D_MODEL), state)
    assert torch.equal(after.h, state.h)
    assert torch.equal(y, state.h[:, None].expand(-1, 5, -1))


@pytest.mark.parametrize("kind", STEPWISE)
def test_xavier(kind: str) -> None:
    """The bounds are those of each gate's own matrix, and the biases are 0."""
    mixer = build(kind, "xavier")
    bound = (6 / (2 * D_MODEL)) ** 0.5
    for block in blocks(mixer):
        assert 0.8 * bound < block.abs().max() <= bound
    state = mixer.state_dict()
    assert all(not state[name].any() for name in state if "bias" in name)


def test_initial_rates_of_mamba2() -> None:
    """Initial steps are in [dt_min, dt_max], and initial −A in A_init."""
    cell = Mamba2(16, 16, head_dim=1, dt_min=0.01, dt_max=0.02, A_init=[2.0, 3.0])
    steps, rates = nn.functional.softplus(cell.dt_bias), cell.A_log.exp()
    for values, least, largest in ((steps, 0.01, 0.02), (rates, 2, 3)):
        assert least - 1e-6 <= values.min() < values.max() <= largest + 1e-6


@pytest.mark.parametrize("kind", sorted(DEFINED["long_memory"]))
def test_long_memory(kind: str) -> None:
    """The decay for a zero input corresponds to time scales between 2 and MAX_TIME_SCALE."""
    torch.manual_seed(0)
    spec = {**mixer_spec(kind), "init": "long_memory"}
    spec |= {"conv_bias": False} if kind == "mamba" else {}  # which the step depends on
    mixer = MIXERS.build(spec, 64, 64).double()
    if mixer.scans:
        with decay_sums([mixer]) as sums:
            mixer(torch.zeros(1, 1, 64, dtype=torch.float64), mixer.init_state(1))
        scales = -1 / sums[0]
    else:
        assert isinstance(mixer, TorchCell)
        # Without the recurrent matrix: the bias alone.
        mixer.get_parameter("cell.weight_hh_l0").data.zero_()
        bias = mixer.get_parameter("cell.bias_ih_l0")[None]
        keep = mixer.step(bias, mixer.init_state(1))[0].keep
        assert keep is not None
        scales = 1 / (1 - keep[0])
    assert scales.min() > 1.99
    assert scales.max() < MAX_TIME_SCALE + 1
    assert scales.max() > MAX_TIME_SCALE / 2
