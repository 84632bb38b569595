"""The recurrent language model: its logits, its architecture, its errors and its fingerprint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from longrnn.ops.ssd import resolve

from longrnn.cells import MIXERS, Edit, EditedState
from longrnn.errors import UserError
from longrnn.models import LanguageModel, RecurrentConfig, RecurrentLM, segments
from longrnn.models.recurrent import BLOCKS
from longrnn.state import LMState
from tests.contracts.builders import (
    D_MODEL,
    VOCAB,
    assert_near,
    assert_trees_equal,
    build_model,
    random_state,
    random_tokens,
)
from tests.refusals import naming

SMALL = RecurrentConfig(vocab_size=VOCAB, d_model=D_MODEL, mixer={"kind": "rnn"})


def refuses(message: str, **changes: Any) -> None:
    with pytest.raises(UserError, match=message) as caught:
        RecurrentLM(replace(SMALL, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("segment", [1, 10**6], ids=["segments", "one-segment"])
@pytest.mark.parametrize("keep", [None, 0, 1, 2, 64, 65, 100, 199, 200, 201, 10**9])
def test_keep_returns_the_last_logits(
    keep: int | None, segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of segments, and with the same final state."""
    monkeypatch.setattr(segments, "segment_tokens", lambda d_model: segment)
    model = build_model("gru")
    tokens, state = random_tokens(2, 200), random_state(model, 2)
    whole, after = model(tokens, state)
    logits, kept_after = model(tokens, state, keep=keep)
    rows = 200 if keep is None else min(keep, 200)
    assert logits.shape == (2, rows, VOCAB)
    assert_near(logits, whole[:, 200 - rows :], 1e-12)
    assert_trees_equal(kept_after, after)


def test_only_kept_logits_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prefill computes no logits of other tokens."""
    model = build_model("rnn")
    seen: list[int] = []
    computed = model.hidden

    def watched(*given: Any, **options: Any) -> tuple[torch.Tensor, LMState]:
        hidden, state = computed(*given, **options)
        seen.append(hidden.shape[1])
        return hidden, state

    monkeypatch.setattr(model, "hidden", watched)
    monkeypatch.setattr(segments, "segment_tokens", lambda d_model: 1)
    model(random_tokens(1, 1000), keep=3)
    model(random_tokens(1, 1000), keep=0)
    assert seen == [3, 0]


@pytest.mark.parametrize("time", [0, 5])
def test_a_negative_keep_is_refused(time: int) -> None:
    """Also for a call without tokens."""
    with pytest.raises(UserError, match=naming("keep", -1)):
        build_model("rnn")(random_tokens(1, time), keep=-1)


@pytest.mark.parametrize("token", [-1, -100, VOCAB, 10**6])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    """The error names the id."""
    tokens = random_tokens(2, 5)
    tokens[1, 3] = token
    with pytest.raises(UserError, match=naming(token, VOCAB)):
        build_model("rnn")(tokens)


@pytest.mark.parametrize("shape", [(3,), (1, 2, 3)])
def test_tokens_must_have_two_axes(shape: tuple[int, ...]) -> None:
    """Any shape other than (batch, time) is refused."""
    with pytest.raises(UserError, match="shape"):
        build_model("rnn")(torch.zeros(shape, dtype=torch.long))


def test_unknown_names_are_refused() -> None:
    """The error suggests the nearest name."""
    refuses("unknown mixer 'mamba': did you mean 'mamba2'", mixer={"kind": "mamba"})
    refuses("unknown position 'sinusoid': did you mean 'sinus", position={"kind": "sinusoid"})
    refuses("unknown block 'residul': did you mean 'residual'", block="residul")
    refuses("no option 'dstate': did you mean 'd_state'", mixer={"kind": "mamba2", "dstate": 4})
    refuses("no option 'd_state': known: init", mixer={"kind": "gru", "d_state": 4})
    refuses("described by a mapping with 'kind'", mixer={"d_state": 4})
    refuses(
        "unknown ssd backend 'chunk': did you mean 'chunked'",
        mixer={"kind": "mamba2", "backend": "chunk", "head_dim": 4},
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("d_state", "many"),
        ("d_state", 1.5),
        ("bias", "perhaps"),
        ("A_init", 3.0),
        ("dt_limit", ["a", "b"]),
        ("norm_eps", None),
    ],
)
def test_an_option_of_the_wrong_type_is_refused(option: str, value: object) -> None:
    """The error is one sentence that names the option."""
    refuses(f"mixer 'mamba2', option '?{option}", mixer={"kind": "mamba2", option: value})


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("vocab_size must be at least 1, not 0", {"vocab_size": 0}),
        ("d_model must be at least 1, not -8", {"d_model": -8}),
        ("n_layers must be at least 1, not 0", {"n_layers": 0}),
        ("head_dim 5 does not divide", {"mixer": {"kind": "mamba2", "head_dim": 5}}),
        ("n_groups 3 does not divide", {"mixer": {"kind": "mamba2", "head_dim": 4, "n_groups": 3}}),
        ("d_conv must be at least 1", {"mixer": {"kind": "mamba2", "head_dim": 4, "d_conv": 0}}),
        ("d_state must be at least 1", {"mixer": {"kind": "mamba2", "d_state": -1}}),
        ("expand must be at least 1", {"mixer": {"kind": "mamba2", "expand": 0}}),
        (r"A_init is \[least, largest\]", {"mixer": {"kind": "mamba2", "A_init": [1.0]}}),
        (r"dt_limit is \[least, largest\]", {"mixer": {"kind": "mamba2", "dt_limit": [0.1]}}),
    ],
)
def test_sizes_that_do_not_fit_are_refused(message: str, changes: dict[str, Any]) -> None:
    """The constructor raises."""
    refuses(message, **changes)


@pytest.mark.parametrize("kind", list(MIXERS))
def test_fingerprint(kind: str) -> None:
    """It is equal for equal models; any weight, dtype or option changes it, a call does not."""
    model: Any = build_model(kind, "random")
    twin = build_model(kind, "random")
    known = model.fingerprint()
    assert len(known) == 16
    assert twin.fingerprint() == known
    model(random_tokens(1, 3))
    assert model.fingerprint() == known
    for parameter in model.parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.view(-1)[-1] += 1e-6
        assert model.fingerprint() != known
        with torch.no_grad():
            parameter.copy_(kept)
    assert model.fingerprint() == known
    model.position.table[0, 0] += 1e-6
    assert model.fingerprint() != known
    assert twin.float().fingerprint() != known
    assert build_model(kind, "random", norm_eps=1e-6).fingerprint() != known


def test_repr_shows_the_backend() -> None:
    """Printing a model shows its backend, even if `auto` selected it."""
    assert f"backend={resolve('auto')}" in repr(build_model("mamba2"))
    spec = {"kind": "mamba2", "d_state": 4, "head_dim": 4, "backend": "reference"}
    assert "backend=reference" in repr(build_model(spec))


def test_tied_head() -> None:
    """Head and embedding share one tensor if, and only if, they are tied."""
    tied, untied = build_model("rnn"), build_model("rnn", tie_embeddings=False)
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight


@pytest.mark.parametrize("position", ["none", "sinusoidal"])
def test_plain_is_the_cell_alone(position: str) -> None:
    """A plain model is embedding → position → cells → head, as in arXiv 2402.00236."""
    model: Any = build_model("lstm", position, "plain", n_layers=1, tie_embeddings=False)
    names = {name.split(".")[0] for name, _ in model.named_parameters()}
    assert names == {"embedding", "blocks", "head"}
    tokens = random_tokens(2, 9)
    positions = torch.arange(9).expand(2, 9)
    x = model.position(model.embedding(tokens), positions)
    y, _ = model.blocks[0].mixer.cell(x)
    torch.testing.assert_close(model(tokens).logits, y @ model.head.weight.T)


def test_residual_block() -> None:
    """Each block is x + mixer(norm(x)), and a norm precedes the head."""
    model: Any = build_model("gru", n_layers=2)
    tokens = random_tokens(2, 9)
    x = model.embedding(tokens)
    for block in model.blocks:
        x = x + block.mixer.cell(block.norm(x))[0]
    torch.testing.assert_close(model(tokens).logits, model.norm(x) @ model.head.weight.T)


@pytest.mark.parametrize("block", list(BLOCKS))
@pytest.mark.parametrize("kind", list(MIXERS))
def test_edits_reach_their_layer(kind: str, block: str) -> None:
    """Edits are called in the order of their layers, and the identity changes nothing."""
    calls: list[int] = []

    class Watch(Edit):
        def __init__(self, layer: int) -> None:
            self.layer = layer

        def scan(self, inputs, state, carry, ssd):
            calls.append(self.layer)
            return super().scan(inputs, state, carry, ssd)

        def advance(self, memory, update, carry):
            calls.append(self.layer)
            return super().advance(memory, update, carry)

    model = build_model(kind, block=block)
    tokens = random_tokens(2, 4)
    edited = model(tokens, edits=[Watch(0), Watch(1)])
    assert sorted(set(calls)) == [0, 1]
    assert calls == sorted(calls)
    torch.testing.assert_close(edited.logits, model(tokens).logits, rtol=1e-12, atol=1e-12)


class Count(Edit):
    """Counts the tokens of each row in its carry, and changes nothing."""

    def init_carry(self, mixer, batch_size):
        return torch.zeros(batch_size, dtype=torch.long)

    def edit_inputs(self, inputs, carry):
        return inputs, carry + inputs.x.shape[1]

    def edit_update(self, update, carry):
        return update, carry + 1


@pytest.mark.parametrize("kind", list(MIXERS))
def test_carries_of_edits_go_through_a_long_call(kind: str, monkeypatch) -> None:
    """A carry goes from segment to segment and from call to call, and is never changed."""
    monkeypatch.setattr(segments, "segment_tokens", lambda d_model: 64)
    model = build_model(kind)
    edits = [Count(), Count()]
    start = model.init_state(2, edits)
    state = model(random_tokens(2, 150), start, edits=edits).state
    assert [carry.tolist() for carry in state.extra] == [[150, 150]] * 2
    state = model(random_tokens(2, 3), state, edits=edits).state
    assert [carry.tolist() for carry in state.extra] == [[153, 153]] * 2
    assert [carry.tolist() for carry in start.extra] == [[0, 0]] * 2


def test_a_state_without_the_carries_of_the_edits_is_refused() -> None:
    """Missing or unexpected carries raise."""
    model = build_model("gru")
    with pytest.raises(UserError, match="init_state"):
        model(random_tokens(2, 3), model.init_state(2), edits=[Count(), Count()])
    with pytest.raises(UserError, match="mitigation"):
        model(random_tokens(2, 3), model.init_state(2, [Count(), Count()]))
    cell = model.cells[0]
    x, state = torch.zeros(1, 2, cell.d_input, dtype=torch.float64), cell.init_state(1)
    with pytest.raises(UserError):
        cell(x, state, Count())
    with pytest.raises(UserError, match="edit"):
        cell(x, EditedState(state, ()))


def test_bfloat16_keeps_a_wide_state() -> None:
    """With bfloat16 weights the recurrent state is float32, so slow decays are not lost."""
    model = build_model("mamba2", dtype=torch.bfloat16)
    tokens = random_tokens(2, 200)
    logits, state = model(tokens)
    assert logits.dtype == torch.bfloat16
    for layer in state.layers:
        assert (layer.conv.dtype, layer.ssm.dtype) == (torch.bfloat16, torch.float32)
    after = model(tokens[:, 77:], model(tokens[:, :77]).state)
    assert_near(after.logits, logits[:, 77:], 0.02)
    assert_near(after.state.layers[0].ssm, state.layers[0].ssm, 1e-2)


def test_long_states_stay_finite() -> None:
    """Position and logits stay correct and finite over 3,000 tokens."""
    model = build_model("mamba2", "sinusoidal", dtype=torch.float32)
    with torch.no_grad():
        logits, state = model(random_tokens(1, 3000), keep=1)
    assert state.position.tolist() == [3000]
    assert logits.isfinite().all()


def test_is_a_language_model() -> None:
    """It has all members of `LanguageModel`."""
    members = [name for name in vars(LanguageModel) if not name.startswith("_")]
    assert members
    model = build_model("rnn")
    assert all(hasattr(model, name) for name in members)
    assert model.vocab_size == VOCAB


@pytest.mark.parametrize("rows", [1, 8, 1000])
def test_segments_of_a_gpu_are_long(rows: int) -> None:
    """A segment costs launches and all-gathers whatever its length, also where it is recomputed."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert segments.segment_width(rows, cpu, 768) == max(64, 512 // rows)
    assert rows * segments.segment_width(rows, gpu, 768) >= 2**16
    again = rows * segments.segment_width(rows, gpu, 768, "segment")
    assert 2**13 <= again <= 2**10 * max(rows, 8)


def test_segments_of_narrow_models_are_longer_on_a_cpu() -> None:
    """Between 512 and 2,048 tokens, so that the activations of a layer stay in the caches."""
    widths = {d: segments.segment_tokens(d) for d in (16, 128, 256, 512, 4096)}
    assert widths == {16: 2048, 128: 2048, 256: 1024, 512: 512, 4096: 512}
