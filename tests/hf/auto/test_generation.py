"""`generate` of transformers on a `LongRNNForCausalLM` equals its definition, row by row."""

from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, TextStreamer

from longrnn import load
from longrnn.errors import UserError
from longrnn.hf.auto import LongRNNForCausalLM, StateCache
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.hf.tokenizer import byte_level
from longrnn.models import generate
from longrnn.state import clone, expand, take
from tests.contracts.builders import (
    VOCAB,
    assert_near,
    assert_trees_equal,
    mitigation_spec,
    random_tokens,
)
from tests.hf.foreign import architecture, build_auto

KINDS = ["lstm", "mamba2"]


def new_tokens(model: Any, tokens: Tensor, count: int, **options: Any) -> Tensor:
    mask = torch.ones_like(tokens)
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": mask, **options}
    return model.generate(tokens, max_new_tokens=count, **options)[:, tokens.shape[1] :]


@torch.no_grad()
def log_probability(model: Any, prompt: Tensor, ids: tuple[int, ...]) -> float:
    whole = torch.cat([prompt, torch.tensor([ids])], 1)
    logits = model.model(whole).logits[0, prompt.shape[1] - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_generation_equals_ours(kind: str) -> None:
    model, tokens = build_auto(kind), random_tokens(3, 6)
    wanted = generate(model.model, tokens, max_new_tokens=8).tokens
    assert new_tokens(model, tokens, 8).tolist() == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_beam_as_wide_as_the_tree_finds_the_most_likely_continuation(kind: str) -> None:
    """With VOCAB beams, three steps of search keep every prefix of two tokens."""
    model, tokens = build_auto(kind, seed=5), random_tokens(2, 5)
    found = new_tokens(model, tokens, 2, num_beams=VOCAB)
    for row, ids in zip(tokens, found.tolist(), strict=True):
        scores = {
            pair: log_probability(model, row[None], pair)
            for pair in product(range(VOCAB), repeat=2)
        }
        assert tuple(ids) == max(scores, key=lambda pair: scores[pair])


@pytest.mark.parametrize("kind", ["lstm", "hybrid"])
def test_texts_begin_with_the_state_of_the_model(kind: str, tmp_path: Path) -> None:
    """After padding and in packed documents, and in a saved model."""
    ours: Any = open_hugging_face(architecture("falcon_h1")) if kind == "hybrid" else None
    ours = build_auto(kind).model if ours is None else ours
    prefix, tokens = random_tokens(1, 4, seed=1), random_tokens(2, 6)
    started = ours.starting_from(ours(prefix).state)
    whole = torch.cat([prefix.expand(2, -1), tokens], 1)
    expected = ours(whole).logits[:, 4:]
    model = LongRNNForCausalLM.of(started)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[:, :2] = 0
    padded = torch.cat([torch.zeros(2, 2, dtype=torch.long), tokens], 1)
    wanted = generate(ours, whole, max_new_tokens=5).tokens
    assert new_tokens(model, padded, 5, attention_mask=mask).tolist() == wanted
    packed = {"input_ids": tokens.flatten()[None], "position_ids": torch.arange(6).repeat(2)[None]}
    assert_near(model(**packed).logits[0], expected.flatten(0, 1), 1e-5)
    model.save_pretrained(tmp_path)
    opened = [load(tmp_path), LongRNNForCausalLM.from_pretrained(tmp_path)]
    opened += [AutoModelForCausalLM.from_pretrained(tmp_path)] if kind == "lstm" else []
    for other in opened:
        assert_near(other(tokens).logits, expected, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_left_padding_changes_nothing(kind: str) -> None:
    model = build_auto(kind, seed=1)
    prompts = [random_tokens(1, length, seed=length).clamp(min=1) for length in (7, 3, 1)]
    width = max(prompt.shape[1] for prompt in prompts)
    tokens = torch.zeros(3, width, dtype=torch.long)
    mask = torch.zeros(3, width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, width - prompt.shape[1] :] = prompt[0]
        mask[row, width - prompt.shape[1] :] = 1
    for beams in (1, 3):
        rows = [new_tokens(model, prompt, 5, num_beams=beams)[0].tolist() for prompt in prompts]
        for known in (mask, None):  # transformers then takes every pad_token_id for padding
            batch = new_tokens(model, tokens, 5, attention_mask=known, num_beams=beams)
            assert batch.tolist() == rows


def test_right_padding_is_refused() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    for known in (mask, None):
        with pytest.raises(UserError, match="padding_side"):
            new_tokens(build_auto(), (1 + mask) * mask, 2, attention_mask=known)


def test_a_prompt_may_end_in_the_pad_token() -> None:
    model, tokens = build_auto(), torch.tensor([[3, 0, 4, 0, 0]])
    wanted = new_tokens(model, tokens[:, 2:], 5, state=model(tokens[:, :2]).past_key_values.state)
    assert torch.equal(new_tokens(model, tokens, 5), wanted)
    padding = {"attention_mask": None, "pad_token_id": 0}
    assert torch.equal(
        new_tokens(model, tokens[:, 2:], 5, **padding), new_tokens(model, tokens[:, 2:], 5)
    )


def test_a_draft_may_end_in_the_pad_token() -> None:
    model, assistant, tokens = build_auto(), build_auto("gru", seed=9), random_tokens(1, 6)
    with torch.no_grad():
        assistant.model.embedding.weight[:] = 0
        assistant.model.head.weight[:] = 0  # all logits are equal, and the first id is taken
    wanted = new_tokens(model, tokens, 9)
    padding = {"attention_mask": None, "pad_token_id": 0}
    assert torch.equal(new_tokens(model, tokens, 9, assistant_model=assistant, **padding), wanted)


@pytest.mark.parametrize("spec", [None, mitigation_spec("sliding_window")], ids=["plain", "window"])
@pytest.mark.parametrize("draft", ["itself", "another", "prompt"])
def test_assisted_decoding_equals_greedy_decoding(draft: str, spec: dict[str, Any] | None) -> None:
    """Drafts of which all, few and some tokens are accepted; the state is rolled back exactly."""
    auto = {} if spec is None else {"mitigation": spec}
    model, tokens = build_auto(auto=auto), random_tokens(1, 12)
    help_: dict[str, Any] = (
        {"prompt_lookup_num_tokens": 3}
        if draft == "prompt"
        else {"assistant_model": model if draft == "itself" else build_auto("lstm", seed=9)}
    )
    wanted = new_tokens(model, tokens, 25)
    assert torch.equal(new_tokens(model, tokens, 25, **help_), wanted)


def test_one_prefix_serves_many_questions() -> None:
    model, prefix, questions = build_auto(), random_tokens(1, 20), random_tokens(4, 3, seed=1)
    state = model(prefix).past_key_values.state
    kept = clone(state)
    wanted = generate(model.model, questions, expand(state, 4), max_new_tokens=5).tokens
    assert new_tokens(model, questions, 5, state=state).tolist() == wanted
    beams = new_tokens(model, questions, 5, state=state, num_beams=2)
    alone = [new_tokens(model, row[None], 5, state=state, num_beams=2)[0] for row in questions]
    assert torch.equal(beams, torch.stack(alone))
    two = model(random_tokens(2, 20, seed=2)).past_key_values.state
    pairs = new_tokens(model, questions[:2], 5, state=two, num_beams=2)
    for row, question in enumerate(questions[:2, None]):
        own = new_tokens(model, question, 5, state=take(two, [row]), num_beams=2)
        assert torch.equal(pairs[[row]], own)
    assert_trees_equal(state, kept)


def test_generation_goes_on_from_a_returned_cache() -> None:
    model, tokens = build_auto(), random_tokens(2, 6)
    wanted = model.generate(tokens, max_new_tokens=9, do_sample=False)
    first = model.generate(tokens, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    cache = first.past_key_values
    assert isinstance(cache, StateCache)
    more = model.generate(first.sequences, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(more, wanted)


def test_a_long_prompt_can_be_read_in_pieces() -> None:
    model, tokens = build_auto(), random_tokens(2, 23)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    wanted = new_tokens(model, tokens, 4, attention_mask=mask)
    pieces = new_tokens(model, tokens, 4, attention_mask=mask, prefill_chunk_size=4)
    assert torch.equal(pieces, wanted)


@pytest.mark.parametrize("kind", ["hybrid", "mamba2"])
def test_arguments_of_generate_have_their_meaning(kind: str) -> None:
    model: Any = build_auto(vocab_size=256)
    if kind == "hybrid":
        hybrid = open_hugging_face(architecture("falcon_h1", vocab_size=256))
        model = LongRNNForCausalLM.of(hybrid)
    prompt, tokenizer = torch.tensor([[97, 98]]), cast(Any, byte_level().tokenizer)
    plain = new_tokens(model, prompt, 6)[0].tolist()
    at = next(i for i, byte in enumerate(plain) if 32 < byte < 128)
    stop = {"stop_strings": [chr(plain[at])], "tokenizer": tokenizer}
    assert new_tokens(model, prompt, 6, **stop)[0].tolist() == plain[: at + 1]
    streamed = StringIO()
    with redirect_stdout(streamed):
        new_tokens(model, prompt, 6, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert streamed.getvalue().strip("\n") == tokenizer.decode(plain).strip("\n")
    allowed = {"prefix_allowed_tokens_fn": lambda row, ids: [65, 66]}
    assert set(new_tokens(model, prompt, 6, **allowed)[0].tolist()) <= {65, 66}
    processors: Any = [lambda ids, scores: -scores]
    least = model(prompt).logits[0, -1].argmin()
    assert new_tokens(model, prompt, 1, logits_processor=processors)[0] == least
    negative = torch.tensor([[122, 122]])
    guided = new_tokens(model, prompt, 1, negative_prompt_ids=negative, guidance_scale=3.0)
    scores = [model(ids).logits[0, -1].log_softmax(-1) for ids in (prompt, negative)]
    assert guided[0] == (3 * scores[0] - 2 * scores[1]).argmax()
    for name, value in (("cache_implementation", "static"), ("assistant_early_exit", 1)):
        with pytest.raises(UserError, match=name):
            new_tokens(model, prompt, 2, **{name: value})
