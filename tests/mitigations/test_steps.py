"""Changes of the steps by numbers per head, with decays per head and per key, in every path."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.cells import MIXERS, Edit, StepChange, Steps, merge
from longrnn.errors import UserError
from longrnn.mitigations import mitigation
from longrnn.models import RecurrentLM
from tests.contracts.builders import assert_near, build_model, mixer_spec, random_tokens

pytestmark = pytest.mark.core

# One head and one key more than any other size, so that a wrong axis does not broadcast.
BATCH, TIME, HEADS, KEYS, CHANNELS = 2, 3, 5, 7, 4
MIXER = {"kind": "mamba2", "d_state": 6, "head_dim": 4, "n_groups": 2}


def random_steps(rate_shape: tuple[int, ...], decay_shape: tuple[int, ...] | None) -> Steps:
    randomness = torch.Generator().manual_seed(0)

    def positive(*shape: int) -> Tensor:
        return torch.rand(shape, generator=randomness, dtype=torch.float64) + 0.1

    decay_dt = None if decay_shape is None else positive(BATCH, TIME, *decay_shape)
    x, dt = positive(BATCH, TIME, HEADS, CHANNELS), positive(BATCH, TIME, HEADS)
    return Steps(x, dt, -positive(*rate_shape), decay_dt)


@pytest.mark.parametrize("rate_shape", [(HEADS,), (BATCH, TIME, HEADS), (HEADS, KEYS)])
@pytest.mark.parametrize("decay_shape", [None, (HEADS,), (HEADS, KEYS)])
def test_numbers_per_head_apply_to_all_keys_of_a_head(
    rate_shape: tuple[int, ...], decay_shape: tuple[int, ...] | None
) -> None:
    steps = random_steps(rate_shape, decay_shape)
    numbers = torch.arange(1.0, HEADS + 1, dtype=torch.float64) / HEADS
    change = StepChange(threshold=numbers / 2, step=2 * numbers, power=numbers, log_rate=numbers)
    edited = Edit(steps=(change,), keep=numbers, add=numbers).apply(steps)
    by_key = rate_shape == (HEADS, KEYS) or decay_shape == (HEADS, KEYS)
    assert edited.log_decay.shape == (BATCH, TIME, HEADS, *[KEYS] * by_key)
    for head, number in enumerate(numbers):
        dt = steps.dt[:, :, head]
        ignored = dt <= number / 2
        assert torch.equal(edited.x[:, :, head] == 0, ignored[..., None].expand(-1, -1, CHANNELS))
        gain = (2 * number * number * dt).masked_fill(ignored, 0)
        assert_near(edited.gain[:, :, head], gain, 1e-10)
        A = steps.A[:, :, head] if steps.A.ndim == 3 else steps.A[head]
        step = dt if steps.decay_dt is None else steps.decay_dt[:, :, head]
        rate = -(A.abs() ** number) * number.exp()
        if by_key:
            step = step if step.ndim == 3 else step[..., None]
            rate = rate[..., None] if rate.ndim == 2 else rate
            ignored = ignored[..., None]
        log_decay = (2 * number * step * rate).masked_fill(ignored, 0) + number.log()
        expected = log_decay.expand_as(edited.log_decay[:, :, head])
        assert_near(edited.log_decay[:, :, head], expected, 1e-10)


def observed_steps(model: RecurrentLM, tokens: Tensor) -> Tensor:
    """The gains of the first cell, `(t, h)`: its steps, where nothing else multiplies x."""
    seen = list[Tensor]()
    hook = model.cells[0].recurrence.register_forward_hook(
        lambda _, args, output: seen.append(args[0].gain)
    )
    model(tokens)
    hook.remove()
    return seen[0][0]


@torch.no_grad()
def assert_decoding_equals_prefill(model: RecurrentLM, tokens: Tensor) -> None:
    whole = model(tokens)
    state, logits = model.init_state(len(tokens)), list[Tensor]()
    for token in tokens.split(1, dim=1):
        output = model(token, state)
        state = output.state
        logits.append(output.logits)
    assert whole.logits.isfinite().all()
    assert_near(torch.cat(logits, 1), whole.logits, 1e-5)
    for ours, expected in zip(model.memories(state), model.memories(whole.state), strict=True):
        assert_near(ours, expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "before", ["none", "scale_delta(scale=0.3)", "scale_delta(scale=0.7)+scale_delta(scale=9.1)"]
)
def test_thresholds_taken_from_changed_steps_ignore_these_steps(
    before: str, dtype: torch.dtype
) -> None:
    """In a call of all tokens and one token at a time alike."""
    tokens = random_tokens(1, 24)
    model = build_model(MIXER, dtype=dtype, n_layers=1).under(before)
    steps = observed_steps(model, tokens)
    for head in range(model.cells[0].n_heads):
        for threshold in steps[:, head].tolist():
            ours = model.under(mitigation({"kind": "token_filter", "threshold": threshold}))
            ignored = observed_steps(ours, tokens)[:, head] == 0
            assert torch.equal(ignored, steps[:, head] <= threshold)
            if head == 0:
                assert_decoding_equals_prefill(ours, tokens)


@pytest.mark.parametrize(
    "spec",
    [
        "power_decay(scale=35)+token_filter(threshold=0.02)",
        "power_decay(scale=35)+power_decay(scale=0.03)",
        "scale_decay(scale=1e30)+scale_decay(scale=1e30)+token_filter(threshold=0.02)",
        "scale_decay(scale=1e-30)+power_decay(scale=20)+power_decay(scale=0.05)",
        "token_filter(threshold=0.02)+scale_delta(scale=3)+token_filter(threshold=0.07)",
    ],
)
def test_strong_changes_of_rates_are_finite_in_any_split(spec: str) -> None:
    model = build_model(MIXER, dtype=torch.float32)
    with torch.no_grad():
        for cell in model.cells:
            cell.A_log.copy_(torch.linspace(-2, 3, len(cell.A_log)))  # type: ignore[union-attr]
    assert_decoding_equals_prefill(model.under(spec), random_tokens(2, 24))


BASE: Any = namedtuple("BASE", [*Edit._fields, "extra"], defaults=[None] * 9)


class Extended(BASE):
    """An edit with a stage that no implementation knows."""

    stages, to, apply, refuse_unknown = Edit.stages, Edit.to, Edit.apply, Edit.refuse_unknown


def test_a_new_stage_is_not_dropped_by_merge() -> None:
    extended: Any = Extended(extra=1.0)
    assert extended.stages == {"extra"}
    assert extended.to(torch.device("cpu")).extra == 1.0
    with pytest.raises(KeyError, match="extra"):
        merge([extended, Extended()])


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("kind", list(MIXERS))
def test_a_stage_that_an_implementation_does_not_know_is_refused(kind: str, backend: str) -> None:
    """By every cell, and by the kernels that compute a whole layer or a whole stack."""
    spec = mixer_spec(kind) | ({"backend": backend} if MIXERS[kind].scans else {})
    model = build_model(spec, dtype=torch.float32)
    edit: Any = Extended(extra=1.0)
    model._edits = [edit] * len(model.cells)
    for tokens in (random_tokens(1, 5), random_tokens(1, 1)):
        with torch.no_grad(), pytest.raises(UserError, match="extra"):
            model(tokens)
