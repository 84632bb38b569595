"""Decoding from static buffers gives what calls give, and waits for the device nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.mitigations import Mitigated, mitigation
from longrnn.mixers import MIXERS
from longrnn.models import decoding, generate
from longrnn.models.base import LMOutput
from longrnn.models.decoding import CallingDecoder, StaticDecoder, captured, decoder
from longrnn.state import LMState, take, tree_map
from tests.contracts.builders import (
    DEFINED,
    MIXER_SPECS,
    POSITION_SPECS,
    VOCAB,
    assert_trees_equal,
    build_mitigated,
    build_model,
    mitigation_spec,
    random_tokens,
    recurrent,
    spec_id,
)
from tests.devices import GPU, CopyCounter
from tests.models.decoders import (
    TOKENS,
    WINDOWS,
    assert_same,
    window_id,
)


@torch.no_grad()
@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_static_buffers_give_the_bits_of_calls(spec: dict[str, Any]) -> None:
    """Logits and states of every cell; states are values before and after."""
    assert_same(build_model(spec))


@torch.no_grad()
@pytest.mark.parametrize(("spec", "mixer"), DEFINED, ids=spec_id)
def test_static_buffers_carry_every_mitigation(spec: dict[str, Any], mixer: dict[str, Any]) -> None:
    """The carry is part of the buffers; the sums of a window are added up in another order."""
    tolerance = 1e-10 if spec["kind"] == "sliding_window" else 0
    assert_same(build_mitigated([spec], mixer), tolerance=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("spec", POSITION_SPECS, ids=spec_id)
def test_static_buffers_count_positions(spec: dict[str, Any]) -> None:
    """The position advances inside the buffers."""
    assert_same(build_model("lstm", spec["kind"]))


def models() -> Iterator[Any]:
    """All cells, mitigations and encodings of positions, and windows with other mitigations."""
    for spec in MIXER_SPECS:
        yield pytest.param(lambda spec=spec: build_model(spec), id=spec_id(spec))
    for spec in POSITION_SPECS:
        yield pytest.param(lambda kind=spec["kind"]: build_model("lstm", kind), id=spec_id(spec))
    chains = [(mixer, [spec]) for spec, mixer in DEFINED]
    for mixer, specs in [*chains, *WINDOWS]:
        name = f"{window_id(specs)}-{spec_id(mixer)}"
        yield pytest.param(lambda m=mixer, s=specs: build_mitigated(s, m), id=name)


class OnGPU:
    """A model on the GPU, whose static states are made from states on the CPU."""

    def __init__(self, model: Any, start: LMState) -> None:
        self.model, self.static = model, model.static_state(start)
        (recurrent(model) if isinstance(model, Mitigated) else model).to(GPU)

    def static_state(self, state: LMState) -> LMState:
        return tree_map(lambda leaf: leaf.to(GPU), self.static)

    def static_tokens(self, state: LMState) -> None:
        return None

    def __call__(self, tokens: Tensor, state: LMState, **options: Any) -> LMOutput:
        return self.model(tokens, state, **options)


@torch.no_grad()
@pytest.mark.parametrize("build", list(models()))
def test_a_token_neither_waits_for_the_device_nor_copies_to_it(build: Any) -> None:
    """Of every model; constants are copied by the first token."""
    model = build()
    assert model.is_capturable
    start = model(random_tokens(2, 5)).state
    moved: Any = OnGPU(model, start)
    static = StaticDecoder(moved, start)
    tokens = torch.zeros(2, dtype=torch.long, device=GPU)
    done = torch.zeros(2, dtype=torch.bool, device=GPU)
    static.step(tokens, None)
    with CopyCounter() as counter:
        static.step(tokens, None)
        static.step(tokens, done)
    assert counter.copies == []


def test_what_reads_the_device_is_not_capturable() -> None:
    """Cells and edits say so."""
    model = build_mitigated([mitigation_spec("forget_more")])
    assert model.is_capturable
    model.edits[1].reads_device = True
    assert not model.is_capturable
    plain = build_model("mamba2")
    assert plain.is_capturable
    plain.mixers[0].reads_device = True
    assert not plain.is_capturable


@pytest.mark.parametrize("stop", [[], [[VOCAB + 1]]], ids=["free", "stop"])
def test_tokens_are_read_once_unless_a_stop_needs_them(
    stop: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read of the device per call of `generate`, and one per token with a stop sequence."""
    model, reads = build_model("gru"), 0
    plain = Tensor.tolist

    def counted(self: Tensor) -> Any:
        nonlocal reads
        reads += 1
        return plain(self)

    monkeypatch.setattr(Tensor, "tolist", counted)
    generate(model, random_tokens(2, 3), max_new_tokens=TOKENS, stop=stop)
    assert reads == (TOKENS if stop else 1)


def test_a_cpu_decodes_by_calls() -> None:
    """A graph needs a GPU."""
    model = build_model("lstm")
    assert isinstance(decoder(model, model.init_state(1), 1000), CallingDecoder)


def test_a_graph_is_captured_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device may be another GPU, whose graph would record nothing."""
    model, current = build_model("gru"), ["cuda:0"]

    @contextmanager
    def on_device(tensor: Tensor) -> Iterator[None]:
        current.append(str(tensor.device))
        yield
        current.pop()

    def prepare(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        assert current[-1] == "cpu"
        return run

    monkeypatch.setattr(decoding, "on_device", on_device)
    static = StaticDecoder(model, model.init_state(2), prepare=prepare)
    done = torch.tensor([True, False])
    for mask in (None, done):
        static.step(torch.zeros(2, dtype=torch.long), mask)
    assert current == ["cuda:0"]


@pytest.mark.cuda
@torch.no_grad()
def test_a_model_on_another_gpu_than_the_current_one_generates_the_same_tokens() -> None:
    """Of two GPUs, or of one under both of its names."""
    prompt, last = random_tokens(2, 5), f"cuda:{torch.cuda.device_count() - 1}"
    for kind in MIXERS:
        wanted = generate(build_model(kind), prompt, max_new_tokens=30)
        model = build_model(kind).to(last)
        assert generate(model, prompt.to(last), max_new_tokens=30).tokens == wanted.tokens


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("spec", [None, "forget_more", "state_norm(threshold=1.0)"])
@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm", "mamba2"])
def test_a_graph_gives_the_bits_of_calls(kind: str, spec: str | None) -> None:
    """Logits and states of each token, with a row that ends."""
    if kind == "rnn" and spec == "forget_more":
        pytest.skip("forget_more is not defined for rnn")
    plain = build_model(kind, dtype=torch.float32).to("cuda")
    model = Mitigated(plain, mitigation(spec)) if spec else plain
    start = model(random_tokens(2, 5).to("cuda")).state
    calls, graph = CallingDecoder(model, start), StaticDecoder(model, start, prepare=captured)
    done = torch.tensor([False, True], device="cuda")
    for index, tokens in enumerate(random_tokens(40, 2, seed=1).to("cuda")):
        mask = done if index > 20 else None
        assert torch.equal(graph.step(tokens, mask), calls.step(tokens, mask))
    assert_trees_equal(graph.state, calls.state)
    whole = generate(model, random_tokens(2, 5).to("cuda"), max_new_tokens=30)
    assert [len(row) for row in whole.tokens] == [30, 30]
    assert take(whole.state, [0]).position.tolist() == [35]
