"""Generation equals the full forward pass recomputed at every token."""

import itertools

import pytest
import torch

from longrnn.models import RecurrentLM, generate
from longrnn.state import take
from tests.contracts.builders import (
    Scripted,
    assert_trees_near,
    build_model,
    generator,
    random_state,
    random_tokens,
)


@pytest.fixture(params=["lstm", "mamba2"])
def model(request: pytest.FixtureRequest) -> RecurrentLM:
    """A model with large logits, whose most likely token changes from token to token."""
    built = build_model(request.param, "sinusoidal", tie_embeddings=False)
    with torch.no_grad():
        built.head.weight.mul_(10)
    return built


def fixed(*probabilities: float) -> Scripted:
    """A model whose next token always has the same probabilities."""
    logits = torch.tensor(probabilities).log()
    return Scripted(len(probabilities), lambda read: logits)


def test_greedy(model: RecurrentLM) -> None:
    """Each token is the argmax of one forward pass over all that came before."""
    prompt = random_tokens(2, 5)
    tokens = generate(model, prompt, max_new_tokens=20).tokens
    assert all(len(row) == 20 for row in tokens)
    assert len(set(tokens[0])) > 2, "a constant continuation would prove little"
    sequence = prompt
    for t in range(20):
        likeliest = model(sequence).logits[:, -1].argmax(-1)
        assert likeliest.tolist() == [row[t] for row in tokens]
        sequence = torch.cat([sequence, likeliest[:, None]], 1)


def test_rows_of_a_batch(model: RecurrentLM) -> None:
    prompt, state = random_tokens(3, 4), random_state(model, 3)
    free = generate(model, prompt, state, max_new_tokens=15)
    stop = [free.tokens[2][3:5]]
    together = generate(model, prompt, state, max_new_tokens=15, stop=stop)
    assert len({len(row) for row in together.tokens}) > 1
    for row in range(3):
        alone = generate(model, prompt[[row]], take(state, [row]), max_new_tokens=15, stop=stop)
        assert alone.tokens == [together.tokens[row]]
        ours = take(together.state, [row])
        assert ours.position.tolist() == alone.state.position.tolist()
        assert_trees_near(ours.layers, alone.state.layers, 1e-10)


def test_the_state_goes_on(model: RecurrentLM) -> None:
    prompt = random_tokens(2, 5)
    free = generate(model, prompt, max_new_tokens=9)
    whole = torch.cat([prompt, torch.tensor(free.tokens)], 1)
    expected = model(whole).state
    assert free.state.position.tolist() == [14, 14]
    more = random_tokens(2, 3)
    torch.testing.assert_close(
        model(more, free.state).logits, model(more, expected).logits, rtol=1e-10, atol=1e-10
    )
    stopped = generate(model, prompt, max_new_tokens=9, stop=[free.tokens[0][:3]])
    assert stopped.tokens[0] == free.tokens[0][:3]
    assert stopped.state.position[0] == 8


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ([], 6),
        ([[]], 6),
        ([[1]], 1),
        ([[1, 1, 1]], 3),
        ([[0], [1, 1]], 2),
        ([[1, 0]], 6),
        ([[1] * 7], 6),
    ],
)
def test_stop(stop: list[list[int]], expected: int) -> None:
    model = fixed(0.1, 0.9)
    tokens, state = generate(model, torch.tensor([[0]]), max_new_tokens=6, stop=stop)
    assert tokens == [[1] * expected]
    assert state.position.tolist() == [1 + expected]


@pytest.mark.parametrize(
    ("top_p", "allowed"),
    [(1e-6, {0}), (0.45, {0}), (0.55, {0, 1}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2, 3})],
)
def test_top_p(top_p: float, allowed: set[int]) -> None:
    """Exactly the fewest tokens whose probabilities reach the sum are drawn."""
    model = fixed(0.5, 0.3, 0.15, 0.05)
    drawn = generate(
        model,
        torch.zeros(100, 1, dtype=torch.long),
        max_new_tokens=5,
        temperature=1.0,
        top_p=top_p,
        generator=generator(0),
    )
    assert set(itertools.chain(*drawn.tokens)) == allowed


def test_temperature() -> None:
    """Frequencies follow softmax(logits / temperature)."""
    model, count = fixed(0.5, 0.3, 0.2), 20_000
    prompt = torch.zeros(count, 1, dtype=torch.long)
    for temperature in (1.0, 0.5, 2.0):
        drawn = generate(
            model, prompt, max_new_tokens=1, temperature=temperature, generator=generator(0)
        )
        found = torch.bincount(torch.tensor(drawn.tokens).flatten(), minlength=3) / count
        expected = torch.softmax(torch.tensor([0.5, 0.3, 0.2]).log() / temperature, 0)
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


def test_sampling_is_reproducible(model: RecurrentLM) -> None:
    prompt, before = random_tokens(2, 4), torch.get_rng_state()

    def sample(seed: int) -> list[list[int]]:
        return generate(
            model, prompt, max_new_tokens=12, temperature=1.5, generator=generator(seed)
        ).tokens

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert torch.equal(torch.get_rng_state(), before)
