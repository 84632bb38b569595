"""Scores and completions on forks equal those of reading every text separately."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot

from longrnn import mitigation
from longrnn.inference import engine, trie
from longrnn.inference.engine import Pair, Score, complete, score
from longrnn.inference.trie import Ids
from longrnn.models import LanguageModel, RecurrentConfig, RecurrentLM, generate
from longrnn.progress import Progress
from longrnn.text import ByteTokenizer
from tests.contracts.builders import KINDS_OF_CELLS, Scripted, mixer_spec, stirred

VOCAB = 40


def speaking(kind: str, vocab_size: int = VOCAB) -> RecurrentLM:
    """A model whose random weights are so large that its output depends on all it has read."""
    torch.manual_seed(1)
    model = RecurrentLM(RecurrentConfig(vocab_size, 12, 2, mixer_spec(kind))).double()
    return stirred(model, 3)


def under_window(kind: str) -> RecurrentLM:
    """A `speaking` model of a kind, or a `mitigated` one."""
    if kind != "mitigated":
        return speaking(kind)
    spec = "sliding_window(window=9)+forget_more(decay_scale=0.9)"
    return speaking("mamba2").under(mitigation(spec))


def words(rng: random.Random, count: int) -> Ids:
    return tuple(rng.randrange(VOCAB) for _ in range(count))


def family(rng: random.Random) -> list[Ids]:
    """Texts of which some share beginnings, some contain others, and some share nothing."""
    head, rest = words(rng, 50), words(rng, 30)
    longer = head + rest
    texts = [head, longer, *(longer + words(rng, n) for n in (1, 1, 20)), head + words(rng, 9)]
    return [*dict.fromkeys([*texts, *(words(rng, n) for n in (1, 2, 60, 60))])]


@torch.no_grad()
def by_itself(model: LanguageModel, pair: Pair) -> Score:
    """The definition: the sum of log-probabilities from one call with one row."""
    ids = torch.tensor([pair.context + pair.continuation])
    logits = model(ids[:, :-1], keep=len(pair.continuation)).logits[0]
    wanted = ids[0, len(pair.context) :]
    nats = torch.log_softmax(logits, -1).gather(1, wanted[:, None]).sum()
    return Score(float(nats), bool((logits.argmax(-1) == wanted).all()))


def scored(model: LanguageModel, pairs: list[Pair], batch_size: int = 3) -> tuple[list[Score], int]:
    """Scores in the order of the pairs, and the number of tokens that were computed."""
    progress = Progress("test", len(pairs), unit="tokens", quiet=True)
    found = dict(score(model, pairs, batch_size=batch_size, progress=progress))
    assert progress.done == len(pairs)
    return [found[index] for index in range(len(pairs))], progress.units


@pytest.mark.parametrize("min_saved", [1, 10**6])
@pytest.mark.parametrize("kind", [*KINDS_OF_CELLS, "mitigated"])
def test_scores_equal_the_definition(
    kind: str, min_saved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without forks; `min_saved` decides where states are forked."""
    monkeypatch.setattr(trie, "MIN_SAVED_TOKENS", min_saved)
    monkeypatch.setattr(trie, "PREFILL_TOKENS", 16)
    monkeypatch.setattr(engine, "MAX_LOGITS", 6 * VOCAB)
    model = under_window(kind)
    rng = random.Random(5)
    pairs = [Pair(text, words(rng, n)) for text in family(rng) for n in (1, 4, 4, 17)]
    # A greedy continuation, so that `greedy` is true for one pair.
    generated = generate(model, torch.tensor([pairs[0].context]), max_new_tokens=5).tokens[0]
    pairs.append(Pair(pairs[0].context, tuple(generated)))
    rng.shuffle(pairs)
    expected = [by_itself(model, pair) for pair in pairs]
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    found, _ = scored(model, pairs, batch_size=3)
    assert max(sizes) == 3
    assert [s.greedy for s in found] == [s.greedy for s in expected]
    assert 0 < sum(s.greedy for s in found) < len(pairs)
    assert [s.nats for s in found] == pytest.approx([s.nats for s in expected], abs=1e-9)


def test_what_texts_share_is_read_once() -> None:
    """The context of several continuations, and beginnings of documents at every level."""
    model, rng = speaking("gru"), random.Random(2)
    context, head, shots = (words(rng, count) for count in (300, 400, 300))
    choices = [Pair(context, words(rng, n)) for n in (1, 5, 5, 9)]
    assert scored(model, choices)[1] == 300 + 0 + 4 + 4 + 8
    texts = [head + shots + words(rng, 10 + n) for n in range(4)] + [head + words(rng, 9)]
    computed = scored(model, [Pair(text, (0,)) for text in texts])[1]
    assert computed <= 400 + 300 + (10 + 11 + 12 + 13) + 9
    # A beginning that is too short for a fork hides no longer one behind it.
    deep = [head[:9] + shots + words(rng, 5) for _ in range(2)] + [head[:9] + words(rng, 5)]
    assert scored(model, [Pair(text, (0,)) for text in deep])[1] == 9 + 300 + 5 + 5 + 14


def test_no_call_returns_more_logits_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long continuations are scored in parts, which are read once."""
    monkeypatch.setattr(engine, "MAX_LOGITS", 32 * VOCAB)
    model, rng, sizes = speaking("mamba2"), random.Random(4), list[int]()
    model.register_forward_hook(lambda _, __, output: sizes.append(output.logits.numel()))
    pairs = [Pair((0,), words(rng, 300)) for _ in range(4)]
    assert scored(model, pairs, batch_size=4)[1] == 1 + 4 * 299
    assert max(sizes) <= 32 * VOCAB


@pytest.mark.parametrize("min_saved", [1, 10**6])
@pytest.mark.parametrize("kind", [*KINDS_OF_CELLS, "mitigated"])
def test_completions_equal_those_of_each_prompt_alone(
    kind: str, min_saved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without forks, and for rows at different phases of their windows."""
    monkeypatch.setattr(trie, "MIN_SAVED_TOKENS", min_saved)
    model, rng = under_window(kind), random.Random(3)
    prompts = family(rng)
    expected = [
        generate(model, torch.tensor([prompt]), max_new_tokens=6).tokens[0] for prompt in prompts
    ]
    progress = Progress("test", len(prompts), unit="tokens", quiet=True)
    how: dict[str, Any] = {"max_new_tokens": 6, "batch_size": 3, "progress": progress}
    found = dict(complete(model, prompts, decode=lambda ids: " ".join(map(str, ids)), **how))
    assert [found[i] for i in range(len(prompts))] == [" ".join(map(str, e)) for e in expected]


def test_a_completion_ends_with_a_text_of_several_bytes_per_character_or_eos() -> None:
    end, decode = "日本語の終わり", ByteTokenizer().decode
    ids = torch.tensor([*f"Once {end} upon a time, and on and on".encode()])
    model = Scripted(256, lambda read: one_hot(ids[read.squeeze(-1) - 1], 256))
    how = {"decode": decode, "max_new_tokens": 40, "batch_size": 1, "until": [end]}
    for eos, wanted in ((None, f"Once {end}"), (ord("c"), "Onc")):
        progress = Progress("test", 1, unit="tokens", quiet=True)
        found = complete(model, [(1,)], eos=eos, progress=progress, **how)  # type: ignore[arg-type]
        assert dict(found) == {0: wanted}


def test_a_completion_ends_with_a_text_of_several_tokens() -> None:
    """Decoding takes a time linear in the tokens."""
    model, decoded = speaking("lstm"), list[int]()

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return "".join(map(chr, ids))

    def completed(until: str) -> str:
        torch.manual_seed(0)
        progress = Progress("test", 1, unit="tokens", quiet=True)
        how: dict[str, Any] = {"max_new_tokens": 300, "temperature": 1.0, "batch_size": 2}
        stops = [until, "never"]
        found = complete(model, [(1, 2, 3)], decode=decode, until=stops, progress=progress, **how)
        return dict(found)[0]

    whole = completed("nor this")
    assert (len(whole), sum(decoded) < 300 * 20) == (300, True)
    end = whole[100:104]
    assert completed(end) == whole[: whole.index(end) + 4]
