"""What training requires of every task, over the registry."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from longrnn.errors import UserError
from longrnn.tasks import TASKS, Batch, Task, base
from longrnn.tasks.base import UNSCORED
from tests.refusals import naming
from tests.tasks.corpora import instruct_corpus
from tests.texts import BOOK

# A length at which each task's rows are real; a new task is asked for its default length.
LENGTHS = {"passkey": 256, "reverse": 6, "sort": 6, "reverse_variable": 40, "text": 20}
# Options that a task cannot be built without.
OPTIONS = {"text": {"files": [str(BOOK)], "max_segments": 1}}
# The score that is best at 0; every other score is best at 1.
LOWER_IS_BETTER = {"edit_distance"}


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A corpus of prompts and answers."""
    folder = tmp_path_factory.mktemp("answers") / "corpus"
    return instruct_corpus(folder, [(f"{k} + {k} = ", str(2 * k)) for k in range(300)])


@pytest.fixture(params=sorted(TASKS))
def task(request: pytest.FixtureRequest, answers: str) -> Task:
    options = OPTIONS.get(request.param, {"corpus": answers} if request.param == "instruct" else {})
    return TASKS.build({"kind": request.param, **options}, None)


def kind_of(task: Task) -> str:
    return next(name for name, member in TASKS.items() if type(task) is member)


def draw(task: Task, seed: int = 0, batch_size: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    length = LENGTHS.get(kind_of(task), task.default_length)
    return task.sample(batch_size, length=length, generator=generator)


def assert_batches_equal(one: Batch, other: Batch) -> None:
    for name, a, b in zip(Batch._fields, one, other, strict=True):
        if isinstance(a, torch.Tensor):
            assert isinstance(b, torch.Tensor), name
            assert torch.equal(a, b), name
        else:
            assert a == b, name


def test_sample_is_a_function_of_the_generator(task: Task) -> None:
    """`sample` depends only on its generator, so that a resumed run sees the same rows."""
    first = draw(task)
    torch.manual_seed(123)
    other = draw(task, seed=1)
    assert_batches_equal(draw(task), first)
    assert not torch.equal(other.tokens, first.tokens)


def test_shapes_and_dtypes(task: Task) -> None:
    """Tokens and targets have one shape; ids are int64 below vocab_size; rows start documents."""
    batch = draw(task)
    assert batch.tokens.shape == batch.targets.shape
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.tokens.min() >= 0
    assert batch.tokens.max() < task.vocab_size
    scored = batch.targets != UNSCORED
    assert scored.any(dim=1).all()
    assert batch.targets[scored].min() >= 0
    assert batch.targets[scored].max() < task.vocab_size
    assert batch.is_document_start.dtype == torch.bool
    assert batch.is_document_start.shape == batch.tokens.shape
    assert batch.begins.tolist() == [True] * 5
    assert batch.query_length == 0
    if batch.weights is not None:
        assert not batch.weights[~scored].any()
        assert (batch.weights >= 0).all()
    assert not (batch.answers() & ~scored).any()


def test_score_of_right_and_wrong_predictions(task: Task) -> None:
    """Right predictions get the best score, wrong ones do not."""
    batch = draw(task)
    right = batch.targets.clone()
    right[~batch.answers()] = 0  # what is said elsewhere is not looked at
    wrong = right.clone()
    wrong[batch.answers()] = (wrong[batch.answers()] + 1) % task.vocab_size
    good, bad = task.score(right, batch), task.score(wrong, batch)
    assert good
    assert good.keys() == bad.keys()
    for name, values in good.items():
        best = 0 if name in LOWER_IS_BETTER else 1
        assert values.shape == (5,)
        assert values.dtype == torch.float32
        assert (values == best).all(), name
        assert (bad[name] != best).all(), name


def test_one_wrong_place_spoils_one_row(task: Task) -> None:
    """A wrong prediction changes the score of its own row only."""
    batch = draw(task)
    said = batch.targets.clone()
    place = batch.answers()[2].nonzero()[-1]
    said[2, place] = (said[2, place] + 1) % task.vocab_size
    for name, values in task.score(said, batch).items():
        best = 0 if name in LOWER_IS_BETTER else 1
        assert ((values != best).tolist()) == [False, False, True, False, False], name


def test_parts_of_a_batch_are_those_of_the_whole(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sample_part` gives the same rows however a batch is divided."""
    monkeypatch.setattr(base, "BLOCK", 4)
    length = LENGTHS.get(kind_of(task), task.default_length)
    how = {"length": length, "seed": 3}
    whole = task.sample_part(range(11), 11, **how)
    for cuts in ([0, 1, 2, 11], [0, 4, 8, 11], [0, 3, 5, 10, 11]):
        parts = [task.sample_part(range(a, b), 11, **how) for a, b in pairwise(cuts)]
        assert_batches_equal(base.joined(parts), whole)
    one = task.sample(3, length=length, generator=torch.Generator().manual_seed(3))
    assert_batches_equal(task.sample_part(range(3), 3, **how), one)


def test_whole_documents_are_pure_where_they_exist(task: Task) -> None:
    """`whole_documents` is a pure function of stream and step, of tasks that read in order."""
    how = {"n_streams": 3, "length": 64, "seed": 0}
    if not task.reads_in_order:
        with pytest.raises(UserError, match="sample"):
            task.whole_documents([0], 0, **how)
        return
    first = task.whole_documents([0, 1, 2], 5, **how)
    task.whole_documents([2], 0, **how)
    assert_batches_equal(task.whole_documents([0, 1, 2], 5, **how), first)
    assert_batches_equal(task.whole_documents([1], 5, **how), first.rows(1, 2))


def test_rows_and_devices_keep_every_field(task: Task) -> None:
    """`rows` and `to` keep every field."""
    batch = draw(task)
    part = batch.rows(1, 3).to(torch.device("cpu"))
    for field, piece in zip(batch, part, strict=True):
        if isinstance(field, torch.Tensor):
            assert isinstance(piece, torch.Tensor)
            assert torch.equal(piece, field[1:3])
        else:
            assert piece == field


def test_segment_is_refused_or_pure(task: Task) -> None:
    """`segment` is a pure function, or refused by a task without documents."""
    if type(task).segment is Task.segment:
        for ask in (
            lambda: task.segment([0], 0, n_streams=1, length=64, seed=0),
            lambda: task.longest_document(64),
        ):
            with pytest.raises(UserError, match=naming("initial_state", "zero")):
                ask()
    else:
        how = {"n_streams": 3, "length": 256, "seed": 0}
        first = task.segment([0, 1], 3, **how)
        assert_batches_equal(task.segment([0, 1], 3, **how), first)
        assert task.longest_document(256) >= 1
