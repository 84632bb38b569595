"""`attention_window`: attention reads the first tokens of a document and the last ones only."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import load
from longrnn import state as states
from longrnn.errors import UserError
from longrnn.hf.foreign import ForeignLM
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.hf.hybrid.model import HybridLM
from longrnn.inference.chunk_select import select
from longrnn.ops.rows import Rows
from tests.contracts.builders import assert_near
from tests.contracts.subjects import read
from tests.hf.foreign import architecture, assert_continues, causal, tokens, with_bytes
from tests.refusals import naming

WINDOW, SINKS, TIME = 5, 2, 30
REACH = WINDOW + SINKS - 1
# Rotary encodings of whole and partial heads, in halves and in pairs; layers without one; latent,
# grouped and shared keys; norms of queries and keys; biases; soft caps; learned sinks; alternating
# windows; linear biases; and hybrids.
KINDS = [
    *("afmoe", "bloom", "cohere", "deepseek_v3", "ernie4_5", "falcon_h1", "gemma2", "gemma4_text"),
    *("glm", "gpt_neox", "gpt_oss", "jamba", "jetmoe", "llama", "mistral", "mpt", "nanochat"),
    *("phi", "qwen2", "qwen3_next", "smollm3", "stablelm"),
]
MORE = [
    *("apertus", "arcee", "aria_text", "axk1", "bailing_hybrid", "bamba", "bitnet", "cohere2"),
    *("cohere2_moe", "diffllama", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma"),
    *("gemma3_text", "gemma3n_text", "glm4", "glm4_moe", "glm4_moe_lite", "granite", "granitemoe"),
    *("granitemoehybrid", "granitemoeshared", "helium", "hy_v3", "hyperclovax", "jais2"),
    *("kimi_linear", "lfm2", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "ministral3"),
    *("mixtral", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe"),
    *("persimmon", "phi3", "phimoe", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text"),
    *("qwen3_moe", "recurrent_gemma", "seed_oss", "solar_open", "starcoder2", "vaultgemma"),
    *("youtu", "zamba", "zamba2", "zaya"),
]


class Definition:
    """One token after another by transformers in float64, each in a call of the whole text.

    In the call of token t the positions are those in the text without what t does not read, its
    mask has the tokens that it reads, and earlier tokens have the outputs of attention that were
    recorded in their own calls.
    """

    def __init__(self, theirs: Any, attention: list[Any], own: list[int | None]) -> None:
        self.theirs, self.own, self.token = theirs, own, 0
        self.outputs: dict[Any, list[Tensor]] = {layer: [] for layer in attention}
        for layer in attention:
            layer.register_forward_hook(self.recorded)

    def recorded(self, layer: Any, given: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        earlier = self.outputs[layer]
        earlier.append(first[:, self.token])
        first = torch.cat([torch.stack(earlier, 1), first[:, len(earlier) :]], 1)
        return (first, *output[1:]) if isinstance(output, tuple) else first

    def mask(self, time: int, window: int, sinks: int) -> Tensor:
        steps = torch.arange(time)
        seen = steps[:, None] >= steps
        seen[self.token] &= (self.token - steps < window) | (steps < sinks)
        mask = torch.zeros(1, 1, time, time, dtype=torch.float64)
        return mask.masked_fill(~seen, torch.finfo(mask.dtype).min)

    def logits(self, text: Tensor, token: int) -> Tensor:
        self.token, steps = token, torch.arange(text.shape[1])
        cut = max(0, token - REACH)
        positions = torch.where(steps < SINKS, steps, (steps - cut).clamp(min=1))
        local = next(filter(None, self.own), WINDOW + 1)
        full = self.mask(text.shape[1], WINDOW, SINKS)
        sliding = self.mask(text.shape[1], local, 0) if local <= WINDOW else full
        kinds = dict.fromkeys(["conv", "mamba", "linear_attention"])
        given: Any = kinds | {"full_attention": full, "hybrid": full, "sliding_attention": sliding}
        code = inspect.getsource(type(self.theirs.base_model).forward)
        if "dict)" not in code:
            given = full
        if self.theirs.config.model_type == "bloom":
            steps = torch.arange(text.shape[1])
            given = ((steps < SINKS) | (token - steps < WINDOW)).expand_as(text).long()
        more = {"position_ids": positions.expand_as(text)}
        if "position_ids" not in inspect.signature(self.theirs.forward).parameters:
            more = {}
        with torch.no_grad(), shifted_biases(self.theirs, positions):
            output = self.theirs(input_ids=text, attention_mask=given, use_cache=False, **more)
        return output.logits[:, token]


@contextmanager
def shifted_biases(theirs: Any, positions: Tensor) -> Iterator[None]:
    """The linear biases of an MPT at other positions."""
    with pytest.MonkeyPatch.context() as patch:
        if theirs.config.model_type == "mpt":
            base, build = theirs.base_model, theirs.base_model.build_mpt_alibi_tensor
            slopes = build(4, 2)[:, :, 1:] - build(4, 2)[:, :, :1]
            patch.setattr(base, "build_mpt_alibi_tensor", lambda *args, **kw: slopes * positions)
        yield


def expected(model: Any, theirs: Any, text: Tensor) -> Tensor:
    """The logits by definition; `theirs` is cast to float64."""
    attention = list(model.attention.layers)
    if not attention:
        names = ("BloomAttention", "MptAttention")
        attention = [part for part in theirs.modules() if type(part).__name__ in names]
    theirs.double().set_attn_implementation("eager")
    theirs.config._experts_implementation = "eager"
    definition = Definition(theirs, attention, model.own_windows())
    return torch.stack([definition.logits(text, token) for token in range(text.shape[1])], 1)


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)]
)
def test_pieces_equal_the_definition(kind: str) -> None:
    """Calls of any length, forks and rows of different lengths read sinks and window exactly."""
    theirs, text = architecture(kind), tokens(2, TIME, seed=3) % 60
    plain: Any = open_hugging_face(theirs)
    full = plain(text).logits
    model = plain.with_attention_window(WINDOW, SINKS)
    assert torch.equal(plain(text).logits, full)
    whole = model(text).logits
    assert_continues(model, text, whole.detach(), 1e-5)
    for one, other in ((plain, model), (model, plain)):
        with pytest.raises(UserError, match=r"attention_window|another model"):
            other(text[:, 4:], one(text[:, :4]).state)
    assert not torch.allclose(whole, full, atol=1e-6)
    assert_near(whole, expected(model, theirs, text).to(whole.dtype), 2e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "deepseek_v3", "falcon_h1"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_padded_and_packed_rows_are_read_as_their_documents(kind: str, sinks: int) -> None:
    model = open_hugging_face(causal(kind)).with_attention_window(WINDOW, sinks)
    text = tokens(3, 40, seed=5) % 60
    before = [
        model(row[None, :length], keep=0).state
        for row, length in zip(text, (0, 4, 15), strict=True)
    ]
    starts = torch.zeros(3, 25, dtype=torch.bool)
    starts[0, [0, 3, 21]] = starts[2, 12] = True
    is_token = torch.ones(3, 25, dtype=torch.bool)
    is_token[1, :9] = is_token[2, 20:] = False
    rows = Rows(is_token, starts)
    logits, after = model(text[:, 15:], states.join(before), rows=rows)
    follow = model(text[:, :4], after).logits
    for row, parts in enumerate([[(0, 3), (3, 21), (21, 25)], [(9, 25)], [(0, 12), (12, 20)]]):
        state = before[row]
        for first, stop in parts:
            given = None if starts[row, first] else state
            alone, state = model(text[row : row + 1, 15 + first : 15 + stop], given)
            assert_near(logits[row, first:stop], alone[0], 1e-5)
        assert_near(follow[row], model(text[row : row + 1, :4], state).logits[0], 1e-5)


@pytest.mark.parametrize("kind", ["llama", "falcon_h1"])
def test_an_empty_state_needs_no_call(kind: str) -> None:
    """Training makes one while the weights are sharded, where the model cannot be called."""
    whole: Any = open_hugging_face(architecture(kind))
    model, twin = (whole.with_attention_window(WINDOW, SINKS) for _ in range(2))
    names = [name for name, _ in states.leaves(twin(tokens(3, 4), keep=0).state)]
    whole.model.forward = None
    assert [name for name, _ in states.leaves(model.init_state(3))] == names


@pytest.mark.parametrize("kind", ["llama", "bloom", "falcon_h1", "mistral"])
def test_a_state_stops_growing(kind: str) -> None:
    """It holds no more memory than its size."""
    model = open_hugging_face(architecture(kind)).with_attention_window(WINDOW, SINKS)
    short, long = (model(tokens(2, time) % 60).state for time in (REACH, 100))
    assert states.nbytes(short) == states.nbytes(long)
    assert all(leaf.untyped_storage().nbytes() <= leaf.nbytes for _, leaf in states.leaves(long))
    assert model.max_length is None


def test_results_at_a_million_tokens_are_as_exact_as_at_a_hundred() -> None:
    model = open_hugging_face(causal("llama")).with_attention_window(WINDOW, SINKS)
    text = tokens(1, 50)
    near = model(text[:, :30], keep=0).state
    far = near._replace(position=near.position + 2**20)
    for count in (1, 20):
        follow = text[:, 30 : 30 + count]
        assert torch.equal(model(follow, near).logits, model(follow, far).logits)


def test_gradients_of_pieces_equal_those_of_one_call() -> None:
    model: Any = HybridLM(causal("falcon_h1").double()).with_attention_window(WINDOW, SINKS)
    text, found = tokens(2, TIME), []
    with torch.inference_mode():  # what it computes once is computed again for gradients
        model(text)
    for sizes in ([TIME], [3, 9, 18]):
        logits, _ = read(model, text, None, sizes)
        total = (logits * torch.linspace(0, 1, logits.shape[-1])).sum()
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        found.append(torch.autograd.grad(total, weights, allow_unused=True))
    for one, other in zip(*found, strict=True):
        if one is not None:
            assert_near(one, other, 1e-9)


def test_it_goes_with_a_mitigation_beyond_the_configured_length(tmp_path: Path) -> None:
    folder = with_bytes(causal("falcon_h1", vocab_size=256), tmp_path / "hybrid")
    plain = load(folder)
    spec = "attention_window(window=16, sinks=4)"
    model = load(f"{folder}+{spec}+state_norm(threshold=1)")
    assert isinstance(model, HybridLM)
    assert model.spec == f"{spec}+state_norm(threshold=1.0)"
    assert model.mitigation is not None
    assert (plain.max_length, model.max_length) == (128, None)
    assert model.under(None).fingerprint() != plain.fingerprint()
    prints = {
        load(f"{folder}+attention_window(window=16, sinks={n})").fingerprint() for n in (0, 4)
    }
    assert len(prints) == 2
    state = model(tokens(1, 200)).state
    assert state.layers[0].unrotated.entries.shape[-2] == 19


def test_it_works_with_narrow_weights_and_selected_chunks(tmp_path: Path) -> None:
    causal("llama").save_pretrained(tmp_path / "llama")
    model = load(f"{tmp_path / 'llama'}+bfloat16+attention_window(window=8, sinks=2)")
    text = tokens(1, 90)[0]
    chosen = select(model, text, text[:5], chunk=20, prefix=text[:7])
    last = model(chosen.prompt[None], keep=1).logits[0, 0].float().softmax(-1)
    entropy = torch.special.entr(last).sum()
    assert_near(entropy, chosen.entropies[chosen.chunk].float(), 0.02)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (129, 0), (127, 2), (4, -1)])
def test_a_window_out_of_range_is_refused(window: int, sinks: int) -> None:
    with pytest.raises(UserError, match=naming(128, window, sinks)):
        open_hugging_face(architecture("llama")).with_attention_window(window, sinks)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gpt2", "transformer.wpe"),
        ("ctrl", "rotary"),
        ("doge", "its own masks"),
        ("falcon", "its own masks"),
        ("gptj", "embed_positions"),
        ("llama4_text", "chunks"),
        ("xlstm", "no attention"),
    ],
)
def test_a_model_whose_attention_cannot_be_limited_is_refused(kind: str, reason: str) -> None:
    with pytest.raises(UserError, match=naming(kind, reason)):
        open_hugging_face(architecture(kind)).with_attention_window(WINDOW, SINKS)


def test_a_window_above_that_of_every_layer_is_refused() -> None:
    with pytest.raises(UserError, match=naming("mistral", 20)):
        open_hugging_face(architecture("mistral")).with_attention_window(20)


def test_options_of_the_name_are_checked(tmp_path: Path) -> None:
    causal("llama").save_pretrained(tmp_path)
    model = load(f"{tmp_path}+attention_window(window=16)")
    assert isinstance(model, ForeignLM)
    assert model.attention_window == (16, 0)
    with pytest.raises(UserError, match=naming("sinks=4")):
        load(f"{tmp_path}+attention_window(sinks=4)")
