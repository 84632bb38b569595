"""A padded or packed batch gives what its documents give one by one.

Outputs, final state and gradients, for every cell, backend, position encoding and mitigation. Rows
are drawn at random: documents of any length, the first of which may continue the given state, with
padding before, between and inside them. Tokens that are not finite change no other row or document.
"""

from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor, nn

from longrnn import state as states
from longrnn.errors import UserError
from longrnn.models import LanguageModel, Rows
from longrnn.state import LMState, leaves
from tests.contracts.builders import (
    DTYPES,
    VOCAB,
    assert_near,
    assert_trees_equal,
    assert_trees_near,
    build_model,
    differentiable,
    random_sizes,
    random_tokens,
)
from tests.contracts.subjects import (
    Subject,
    assert_same,
    cell_leaves,
    every_kind,
    every_subject,
    every_subject_in_a_dtype,
    functional,
    in_float64,
    outcome,
    outcome_of,
    random_masks,
    read,
    small_chunks,
    started,
)

pytestmark = pytest.mark.core

TIME = 70  # more than a chunk of the C++ kernels, and than a segment of `small_chunks`


def packed_tokens(is_token: Tensor, seed: int) -> Tensor:
    """Random ids; those at padding are not in the vocabulary."""
    return random_tokens(len(is_token), is_token.shape[1], seed).masked_fill(~is_token, VOCAB + 3)


def one_by_one(
    model: LanguageModel, tokens: Tensor, state: LMState, masks: Sequence[Tensor]
) -> dict[str, Tensor]:
    """`outcome`, computed document by document without masks; the logits at padding are 0."""
    state = differentiable(state)
    outputs, finals = [], []
    for row, (ids, is_token, starts) in enumerate(zip(tokens, *masks, strict=True)):
        after = states.take(state, [row])
        times = is_token.nonzero()[:, 0].tolist()
        bounds = [i for i, time in enumerate(times) if starts[time] or i == 0]
        logits = torch.zeros(len(ids), VOCAB, dtype=next(model.parameters()).dtype)
        for first, last in pairwise([*bounds, len(times)]):
            document = times[first:last]
            if starts[document[0]]:
                after = model.init_state(1)
            found, after = model(ids[None, document], after)
            logits = logits.index_copy(0, torch.tensor(document), found[0])
        outputs.append(logits)
        finals.append(after)
    return outcome_of(model, torch.stack(outputs), state, states.join(finals))


@every_subject_in_a_dtype
def test_documents_are_those_of_separate_rows(subject: Subject, dtype: torch.dtype) -> None:
    """In one call without gradients, and with them in pieces, of which one is nearly all."""
    model = subject.build(dtype)
    masks = random_masks(2, TIME, seed=1)
    tokens, state = packed_tokens(masks[0], 1), started(model, 2)
    with small_chunks(16):
        expected = one_by_one(model, tokens, state, masks)
        assert_same(outcome(model, tokens, state, [1, 0, 66, 3], masks), expected, dtype)
    with torch.no_grad():
        logits, after = read(model, tokens, state, [TIME], masks)
    found = {"logits": logits, "position": after.position, **cell_leaves(model, after)}
    assert_same(found, {name: expected[name].detach() for name in found}, dtype)


@every_kind
def test_documents_begin_with_the_state_of_their_model(subject: Subject) -> None:
    """One that is trained; it gets its gradient from every document."""
    plain = subject.build()
    model = plain.starting_from(started(plain, 1, seed=4))
    assert model.start is not None
    leaves = states.recurrent(model.start.layers)
    model.learned = nn.ParameterList([leaf[0] + 0.1 for leaf in leaves])
    masks = random_masks(2, TIME, seed=2)
    tokens, state = packed_tokens(masks[0], 2), started(model, 2)
    found = outcome(model, tokens, state, [2, 68], masks)
    with small_chunks(16):
        assert_same(found, one_by_one(model, tokens, state, masks), torch.float64)
    gradients = [value for name, value in found.items() if "parameter learned." in name]
    assert any(gradient.any() for gradient in gradients)


@pytest.mark.slow
@every_subject
def test_random_rows(subject: Subject) -> None:
    for dtype, seed in product(DTYPES, range(10)):
        model = subject.build(dtype, seed=seed, n_layers=2)
        batch, time = 1 + seed % 4, 20 + 31 * seed
        masks = random_masks(batch, time, seed)
        tokens, state = packed_tokens(masks[0], seed), started(model, batch, seed)
        found = outcome(model, tokens, state, random_sizes(time, seed, empty=True), masks)
        expected, exact = one_by_one(model, tokens, state, masks), None
        if dtype == torch.float32:
            double, wide = in_float64(model, state)
            exact = one_by_one(double, tokens, wide, masks)
        assert_same(found, expected, dtype, exact=exact)


@every_kind
def test_padding_is_not_read(subject: Subject) -> None:
    """Rows of padding keep their state bit for bit, and their logits are 0."""
    model = subject.build()
    state, tokens = started(model, 2), random_tokens(2, 9, seed=8)
    nothing = torch.zeros(2, 9, dtype=torch.bool)
    logits, after = model(tokens + VOCAB, state, rows=Rows(nothing))
    assert_trees_equal(after, state)
    assert logits.shape == (2, 9, VOCAB)
    assert not logits.any()
    one = nothing.clone()
    one[0, 4] = True
    logits, after = model(tokens, state, rows=Rows(one))
    assert not logits[~one].any()
    # Joined, because a longer history has zeros in front of what it had.
    both = states.join([states.take(one, [1]) for one in (after, state)])
    assert_trees_equal(states.take(both, [0]), states.take(both, [1]))


@every_kind
def test_a_document_with_nan_does_not_reach_the_next(subject: Subject) -> None:
    nan, time = VOCAB - 1, 30
    model = subject.build(tie_embeddings=False)
    tokens = random_tokens(2, time, seed=9) % nan
    starts = torch.zeros(2, time, dtype=torch.bool)
    starts[:, [0, 7, 15]] = True
    masks = torch.ones_like(starts), starts
    state = started(model, 2)
    broken = states.tree_map(
        lambda leaf: leaf * torch.nan if leaf.is_floating_point() else leaf, state
    )
    expected = outcome(model, tokens, state, [time], masks)
    assert_same(outcome(model, tokens, broken, [time], masks), expected, torch.float64)
    split = outcome(model, tokens, broken, [5, 3, 22], masks)
    assert_same(split, expected, torch.float64)

    with torch.no_grad():
        model.embedding.weight[nan] = torch.nan
    tokens[0, 9] = nan
    start = differentiable(state)
    with small_chunks():
        logits, after = model(tokens, start, rows=Rows(None, starts))
        alone = model(tokens[:, 15:]).logits
        sources = [leaf for _, leaf in leaves(start) if leaf.requires_grad]
        later = functional((logits[:, 15:], after), 3)
        grads = torch.autograd.grad(later, sources, materialize_grads=True)
    assert not any(one.any() for one in grads)
    found = logits.isfinite().all(-1)
    assert not found[0, 9:15].any()
    assert found[0, :7].all()
    assert found[0, 15:].all()
    assert found[1].all()
    assert all(leaf.isfinite().all() for _, leaf in leaves(after))
    assert_near(logits[:, 15:], alone, 1e-10)


@every_kind
def test_other_rows_and_earlier_calls_do_not_change(subject: Subject) -> None:
    """Row 0 reads NaN and row 2 infinity, of which what comes later is not defined."""
    time, bad = 30, 11
    model = subject.build(tie_embeddings=False)
    start = differentiable(started(model, 3))
    with torch.no_grad():
        model.embedding.weight[VOCAB - 1, 3:5] = torch.nan
        model.embedding.weight[VOCAB - 2, 3:5] = torch.inf
    tokens = random_tokens(3, time).clamp(max=VOCAB - 3)
    broken = tokens.clone()
    broken[[0, 2], bad] = torch.tensor([VOCAB - 1, VOCAB - 2])
    sources = {name: leaf for name, leaf in leaves(start) if leaf.requires_grad}

    def gradients(logits: Tensor) -> tuple[Tensor, ...]:
        given = list(sources.values())
        return torch.autograd.grad(functional(logits[1], 5), given, materialize_grads=True)

    clean, clean_state = read(model, tokens, start, [time])
    expected = gradients(clean)
    with small_chunks():
        logits, state = read(model, broken, start, [bad, 1, 1, time - bad - 2])
        found = gradients(logits)
    assert_near(logits[:, :bad], clean[:, :bad], 1e-10)
    assert_near(logits[1], clean[1], 1e-10)
    assert not logits[[0, 2], bad].isfinite().any()
    ours, theirs = (states.take(one, [1]) for one in (state, clean_state))
    assert_trees_near(ours, theirs, 1e-10)
    for name, one, other in zip(sources, found, expected, strict=True):
        assert_near(one[1], other[1], 1e-10, name)


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ((torch.ones(2, 3), None), "is_token.*bool"),
        ((torch.ones(3, dtype=torch.bool), None), "is_token"),
        ((None, None), "is_token or is_document_start"),
        ((torch.ones(2, 3).bool(), torch.ones(2, 4).bool()), "shape"),
        ((torch.zeros(2, 3).bool(), torch.ones(2, 3).bool()), "padding"),
    ],
)
def test_masks_that_cannot_be_used_are_refused(masks: tuple, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Rows(*masks)
    with pytest.raises(UserError, match="rows"):
        build_model()(random_tokens(2, 3), rows=Rows(torch.ones(2, 4).bool()))
