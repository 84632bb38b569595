"""Continuations scored on forks, against reading every pair by itself."""

from __future__ import annotations

import random

import pytest
import torch

from longrnn import Mitigated, mitigation
from longrnn.inference import prefill, trie
from longrnn.inference.completion import complete
from longrnn.inference.scoring import Pair, Score, score
from longrnn.inference.trie import Ids, read_texts
from longrnn.mixers import MIXERS
from longrnn.models import LanguageModel, RecurrentConfig, RecurrentLM, generate
from longrnn.progress import Progress
from tests.contracts.builders import mixer_spec, stirred

VOCAB = 40


def speaking(kind: str) -> RecurrentLM:
    """Random weights, large enough that what comes next depends on all that was read."""
    torch.manual_seed(1)
    model = RecurrentLM(RecurrentConfig(VOCAB, 12, 2, mixer_spec(kind))).double()
    return stirred(model, 3)


def words(rng: random.Random, count: int) -> Ids:
    return tuple(rng.randrange(VOCAB) for _ in range(count))


def family(rng: random.Random) -> list[Ids]:
    """Texts that begin with others, end inside others, and have nothing in common."""
    head, tail = words(rng, 50), words(rng, 30)
    longer = head + tail
    texts = [head, longer, *(longer + words(rng, n) for n in (1, 1, 20)), head + words(rng, 9)]
    return [*dict.fromkeys([*texts, *(words(rng, n) for n in (1, 2, 60, 60))])]


@torch.no_grad()
def by_itself(model: LanguageModel, pair: Pair) -> Score:
    """The definition: one row, in one call, in float64, and log-probabilities are added."""
    ids = torch.tensor([pair.context + pair.continuation])
    logits = model(ids[:, :-1], keep=len(pair.continuation)).logits[0]
    wanted = ids[0, len(pair.context) :]
    nats = torch.log_softmax(logits, -1).gather(1, wanted[:, None]).sum()
    return Score(float(nats), bool((logits.argmax(-1) == wanted).all()))


def scored(model: LanguageModel, pairs: list[Pair], batch_size: int = 3) -> tuple[list[Score], int]:
    """Scores in order, and the tokens that were computed."""
    progress = Progress("test", len(pairs), unit="tokens", quiet=True)
    found = dict(score(model, pairs, batch_size=batch_size, progress=progress))
    assert progress.done == len(pairs)
    return [found[index] for index in range(len(pairs))], progress.units


@pytest.mark.parametrize("min_saved", [1, 10**6])
@pytest.mark.parametrize("kind", [*MIXERS, "mitigated"])
def test_by_itself(kind: str, min_saved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, forks and pieces that touch each other; `min_saved` decides where states are forked."""
    monkeypatch.setattr(trie, "MIN_SAVED_TOKENS", min_saved)
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 16)
    monkeypatch.setattr(prefill, "MAX_LOGITS", 6 * VOCAB)
    spec = "sliding_window(window=9)+forget_more(decay_scale=0.9)"
    model = (
        Mitigated(speaking("mamba2"), mitigation(spec)) if kind == "mitigated" else speaking(kind)
    )
    rng = random.Random(5)
    pairs = [Pair(text, words(rng, n)) for text in family(rng) for n in (1, 1, 4, 17)]
    # What the model says itself, so that `greedy` is seen to be true.
    said = generate(model, torch.tensor([pairs[0].context]), max_new_tokens=5).tokens[0]
    pairs.append(Pair(pairs[0].context, tuple(said)))
    rng.shuffle(pairs)
    expected = [by_itself(model, pair) for pair in pairs]
    found, _ = scored(model, pairs)
    assert [s.greedy for s in found] == [s.greedy for s in expected]
    assert 0 < sum(s.greedy for s in found) < len(pairs)
    assert [s.nats for s in found] == pytest.approx([s.nats for s in expected], abs=1e-9)


def test_choices_share_their_context() -> None:
    """A context that is read once for each choice."""
    model, rng = speaking("mamba2"), random.Random(1)
    context = words(rng, 300)
    choices = [Pair(context, words(rng, n)) for n in (1, 5, 5, 9)]
    assert scored(model, choices)[1] == 300 + 0 + 4 + 4 + 8


def test_heads_are_shared() -> None:
    """Documents that begin alike, and some of them alike for longer."""
    model, rng = speaking("gru"), random.Random(2)
    head, shots = words(rng, 400), words(rng, 300)
    texts = [head + shots + words(rng, 10 + n) for n in range(4)] + [head + words(rng, 9)]
    computed = scored(model, [Pair(text, (0,)) for text in texts])[1]
    assert computed <= 400 + 300 + (10 + 11 + 12 + 13) + 9


def test_logits_of_a_long_continuation(monkeypatch: pytest.MonkeyPatch) -> None:
    """More logits at one time than a piece has."""
    monkeypatch.setattr(prefill, "MAX_LOGITS", 32 * VOCAB)
    model, rng = speaking("mamba2"), random.Random(4)
    sizes: list[int] = []
    model.register_forward_hook(lambda _, __, output: sizes.append(output.logits.numel()))
    _, computed = scored(model, [Pair((0,), words(rng, 3000)) for _ in range(4)], batch_size=4)
    assert computed == 1 + 4 * 2999
    assert max(sizes) <= 32 * VOCAB


def test_nothing_to_score() -> None:
    """No pairs, and the empty text."""
    model = speaking("rnn")
    assert scored(model, []) == ([], 0)
    progress = Progress("test", 1, unit="tokens", quiet=True)
    (found,) = read_texts(model, [()], 2, progress)
    assert found.numbers == [0]
    assert found.state.position.tolist() == [0]


@pytest.mark.parametrize("min_saved", [1, 10**6])
def test_completions(min_saved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that differ from those of each prompt by itself."""
    monkeypatch.setattr(trie, "MIN_SAVED_TOKENS", min_saved)
    model, rng = speaking("lstm"), random.Random(3)
    prompts = family(rng)
    expected = [
        generate(model, torch.tensor([prompt]), max_new_tokens=6).tokens[0] for prompt in prompts
    ]
    progress = Progress("test", len(prompts), unit="tokens", quiet=True)
    found = dict(
        complete(
            model,
            prompts,
            decode=lambda ids: " ".join(map(str, ids)),
            until=[],
            eos=None,
            max_new_tokens=6,
            temperature=0.0,
            top_p=1.0,
            batch_size=3,
            progress=progress,
        )
    )
    assert [found[i] for i in range(len(prompts))] == [" ".join(map(str, e)) for e in expected]
