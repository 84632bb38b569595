"""Under a window, or with a table of positions, decoding from buffers gives what calls give."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.models import generate
from longrnn.models.decoding import CallingDecoder, StaticDecoder, captured
from longrnn.ops import triton as kernels
from longrnn.state import join, nbytes, take
from tests.contracts.builders import (
    assert_near,
    build_mitigated,
    build_model,
    generator,
    mitigation_spec,
    random_tokens,
)
from tests.devices import ReadCounter
from tests.models.decoders import (
    DECODERS,
    TOKENS,
    WINDOWS,
    assert_same,
    assert_trees_near,
    window,
    window_id,
)
from tests.refusals import naming


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
        with pytest.raises(UserError, match=naming("position", end)):
            each.step(tokens, done)


@torch.no_grad()
@pytest.mark.parametrize("Decoder", DECODERS)
@pytest.mark.parametrize("mixer", ["mamba2", "lstm"])
def test_a_row_that_ended_with_the_table_does_not_stop_the_chunks_of_others(
    mixer: str, Decoder: Any
) -> None:
    """The last token of a chunk of a window needs a call, which compares all positions."""
    model: Any = build_mitigated([window(4)], mixer, position="learned")
    end, done = model.max_length, torch.tensor([True, False])
    state = model(random_tokens(2, 2)).state
    decoder = Decoder(model, state._replace(position=torch.tensor([end, end - 10])))
    alone = Decoder(model, take(state, [1])._replace(position=torch.tensor([end - 10])))
    for tokens in random_tokens(10, 2):
        found, wanted = decoder.step(tokens, done), alone.step(tokens[1:], None)
        assert_near(found[1:], wanted, 1e-10)
    assert decoder.state.position.tolist() == [end, end]


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
