"""Decoding from static buffers gives what calls give, and waits for the device nowhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.mitigations import Mitigated, mitigation
from longrnn.mixers import MIXERS
from longrnn.models import decoding, generate
from longrnn.models.base import CapturableModel, LMOutput
from longrnn.models.decoding import CallingDecoder, StaticDecoder, captured, decoder
from longrnn.ops import triton as kernels
from longrnn.state import LMState, PyTree, clone, join, leaves, nbytes, take, tree_map
from tests.contracts.builders import (
    DEFINED,
    MIXER_SPECS,
    POSITION_SPECS,
    VOCAB,
    assert_near,
    assert_trees_equal,
    build_mitigated,
    build_model,
    generator,
    mitigation_spec,
    random_tokens,
    recurrent,
    spec_id,
)
from tests.devices import GPU, CopyCounter, ReadCounter

TOKENS = 12
DECODERS = (CallingDecoder, StaticDecoder)


def assert_same(model: CapturableModel, start: LMState | None = None, tolerance: float = 0) -> None:
    """Both decoders, with a row that ends and goes on, from a state that was carried in.

    Args:
        model: decodes `TOKENS` tokens.
        start: of three rows; None for one after five tokens.
        tolerance: 0 for the same bits.
    """
    start = model(random_tokens(3, 5)).state if start is None else start
    given = clone(start)
    calls, static = CallingDecoder(model, start), StaticDecoder(model, start)
    done = torch.tensor([False, True, False])
    for index, tokens in enumerate(random_tokens(TOKENS, 3, seed=1)):
        kept, values = static.state, clone(static.state)
        mask = done if TOKENS // 2 < index < TOKENS - 2 else None
        live = slice(None) if mask is None else ~mask
        found, wanted = (decoder.step(tokens, mask)[live] for decoder in (static, calls))
        if tolerance == 0:
            assert_trees_equal((found, static.state), (wanted, calls.state))
        else:
            assert_trees_near((found, static.state), (wanted, calls.state), tolerance)
        assert_trees_equal(kept, values)
    assert_trees_equal(start, given)


def assert_trees_near(actual: PyTree, expected: PyTree, tolerance: float) -> None:
    ours, theirs = dict(leaves(actual)), dict(leaves(expected))
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        assert leaf.dtype == theirs[name].dtype, name
        assert_near(leaf, theirs[name], tolerance, name)


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


def window(size: int, **options: Any) -> dict[str, Any]:
    return {"kind": "sliding_window", "window": size, **options}


# Chunks that end during `TOKENS` tokens, and more than one block of chunks; windows of some layers
# and heads, and with other mitigations.
WINDOWS: list[tuple[str, list[dict[str, Any]]]] = [
    ("mamba2", [window(1)]),
    ("mamba2", [window(4, chunk=4)]),
    ("mamba2", [mitigation_spec("forget_more"), window(11, chunk=3)]),
    ("mamba2", [window(9, chunk=2, heads=[1]), mitigation_spec("token_filter")]),
    ("mamba2", [mitigation_spec("scale_delta"), window(12, chunk=3, layers=[1])]),
    ("gru", [mitigation_spec("forget_more"), window(5)]),
    ("lstm", [window(1)]),
    ("lstm", [mitigation_spec("forget_more"), window(3, layers=[1])]),
]


def window_id(case: object) -> str:
    return "-".join(map(spec_id, case)) if isinstance(case, list) else str(case)


@torch.no_grad()
@pytest.mark.parametrize("phases", ["equal", "different"])
@pytest.mark.parametrize(("kind", "specs"), WINDOWS, ids=window_id)
def test_static_buffers_carry_windows(kind: str, specs: list[dict[str, Any]], phases: str) -> None:
    """Over the ends of chunks and blocks, also where each row reaches them at another token."""
    model = build_mitigated(specs, kind)
    start = model(random_tokens(3, 13)).state
    if phases == "different":
        rows = [model(random_tokens(1, 13 - n, seed=n)).state for n in range(3)]
        start = join(rows)
    assert_same(model, start, 1e-10)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "options", "calls"), [("mamba2", {"chunk": 4}, 3), ("gru", {}, 2)]
)
def test_only_the_last_token_of_a_chunk_needs_a_call(
    kind: str, options: dict[str, int], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 tokens after 5, in chunks of 4 tokens; the window of a GRU has blocks of 8 tokens."""
    model = build_mitigated([window(8, **options)], kind)
    static = StaticDecoder(model, model(random_tokens(2, 5)).state)
    plain, found = model.forward, []

    def counted(*args: Any, **named: Any) -> Any:
        found.append(not named.get("checked", False))
        return plain(*args, **named)

    monkeypatch.setattr(model, "forward", counted)
    for tokens in random_tokens(TOKENS, 2):
        static.step(tokens, None)
    assert len(found) == TOKENS
    assert sum(found) == calls


@torch.no_grad()
def test_a_token_copies_no_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two ends of chunks, buffers of the window are changed in place or not at all."""
    model = build_mitigated([window(64, chunk=8)])
    static = StaticDecoder(model, model(random_tokens(2, 80)).state)
    done = torch.tensor([True, False])
    static.step(random_tokens(2, 1)[:, 0], done)  # prepares
    carry = static._origin.extra.carry
    plain, copied = Tensor.copy_, 0

    def counted(self: Tensor, other: Tensor) -> Tensor:
        nonlocal copied
        copied += nbytes(self)
        return plain(self, other)

    monkeypatch.setattr(Tensor, "copy_", counted)
    for tokens in random_tokens(3, 2):
        before = copied
        static.step(tokens, done)
        assert copied - before < 2 * nbytes(static._origin.layers)
    assert all(one is other for one, other in zip(carry, static._origin.extra.carry, strict=True))
    assert nbytes(static._buffers.extra.carry) < nbytes(carry) / 2


@torch.no_grad()
@pytest.mark.parametrize("kind", ["learned", "random"])
def test_a_table_of_positions_ends_where_it_ends_in_calls(kind: str) -> None:
    """A row that has ended at the end of the table does not stop the others."""
    model: Any = build_model("lstm", kind)
    end = model.max_length
    state = model(random_tokens(2, 2)).state
    at = torch.tensor([end - 3, end - 1])
    decoders = [Decoder(model, state._replace(position=at)) for Decoder in DECODERS]
    tokens, done = random_tokens(2, 1)[:, 0], torch.tensor([False, True])
    for mask in (None, done, done):
        first, second = (each.step(tokens, mask) for each in decoders)
        assert torch.equal(first[0], second[0])
    assert decoders[1].state.position.tolist() == [end, end]
    for each in decoders:
        with pytest.raises(UserError, match=f"position {end} is past"):
            each.step(tokens, done)


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


@torch.no_grad()
@pytest.mark.parametrize(
    "build",
    [
        lambda: build_mitigated([mitigation_spec("token_filter"), window(7, chunk=3)]),
        lambda: build_mitigated([window(5)], "lstm", position="learned"),
    ],
    ids=["mamba2", "lstm"],
)
def test_texts_from_buffers_are_those_from_calls(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padding in the prompt, and rows that end at different tokens."""
    model, found = build(), []
    prompt, is_token = random_tokens(4, 6), torch.ones(4, 6, dtype=torch.bool)
    is_token[0, :2] = is_token[2, :5] = False
    for Decoder in DECODERS:
        module = sys.modules["longrnn.models.generate"]
        monkeypatch.setattr(module, "decoder", lambda model, state, _, D=Decoder: D(model, state))
        options: Any = {"temperature": 1.0, "generator": generator(3), "is_token": is_token}
        found.append(generate(model, prompt, max_new_tokens=30, stop=[[2], [5]], **options))
    called, static = found
    assert static.tokens == called.tokens
    assert len({len(row) for row in called.tokens}) > 1
    assert_trees_near(static.state, called.state, 1e-10)


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


@torch.no_grad()
@pytest.mark.skipif(not kernels.available(), reason=str(kernels.missing()))
def test_triton_kernels_under_a_window_read_nothing_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the end of a chunk; logits and states are those of calls."""
    mixer = {"kind": "mamba2", "d_state": 6, "head_dim": 16, "backend": "triton"}
    specs = [mitigation_spec("forget_more"), window(7, chunk=5)]
    model: Any = build_mitigated(specs, mixer, n_layers=1)
    model.to("cpu" if kernels.interpreting() else "cuda")
    plain = build_mitigated(specs, {**mixer, "backend": "chunked"}, n_layers=1)
    start = plain(random_tokens(1, 12)).state
    calls, static = CallingDecoder(plain, start), StaticDecoder(model, start)
    lists: list[Tensor] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: lists.append(self) or tolist(self))
    for tokens in random_tokens(2, 1, seed=1):
        lists.clear()
        with ReadCounter() as counter:
            logits = static.step(tokens, None)
        assert counter.reads == lists == []
        assert_near(logits, calls.step(tokens, None), 1e-10)
        assert_trees_near(static.state, calls.state, 1e-10)


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
@pytest.mark.parametrize("kind", ["gru", "lstm", "mamba2"])
def test_a_graph_under_a_window_gives_what_calls_give(kind: str) -> None:
    """Over the ends of chunks, at another token in each row."""
    model: Any = build_mitigated([mitigation_spec("forget_more"), window(11)], kind).to("cuda")
    start = join([model(random_tokens(1, n).to("cuda")).state for n in (5, 8)])
    calls, graph = CallingDecoder(model, start), StaticDecoder(model, start, prepare=captured)
    done = torch.tensor([False, True], device="cuda")
    for index, tokens in enumerate(random_tokens(40, 2, seed=1).to("cuda")):
        mask = done if index > 20 else None
        assert_near(graph.step(tokens, mask)[:1], calls.step(tokens, mask)[:1], 1e-9)
        assert_trees_near(graph.state, calls.state, 1e-9)


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
