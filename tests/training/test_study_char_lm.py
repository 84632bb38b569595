"""The character study runs from end to end, goes on where it stopped, and judges by its numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from longrnn.errors import UserError
from scripts import char_mlp
from scripts.report_char_lm import MLP, SETTINGS, verdict
from scripts.study_char_lm import TOLERANCE, choose, matched, parameters, training
from tests.refusals import naming
from tests.training.runs import ENVIRONMENT

REPOSITORY = Path(__file__).parents[2]
OTHERS = {setting.name: [1.0, 1.1, 1.2] for setting in SETTINGS}


def test_models_of_one_size() -> None:
    """The compared models have about the same number of parameters."""
    sizes = [parameters(matched(kind, 96)) for kind in ("rnn", "gru", "lstm", "mamba2")]
    assert max(sizes) <= (1 + TOLERANCE) ** 2 * min(sizes)
    assert sizes[0] == 2 * 256 * 96 + 2 * 96 * 96 + 2 * 96
    mlp = char_mlp.parameters(char_mlp.matched(sizes[0]))
    assert mlp == pytest.approx(sizes[0], rel=TOLERANCE)


def test_the_baseline_sees_its_context_and_no_more() -> None:
    """Any split gives the same logits, and a character matters for exactly CONTEXT predictions."""
    torch.manual_seed(0)
    model = char_mlp.ContextMLP(256, 12)
    tokens = torch.randint(256, (2, 30))
    whole = model(tokens)
    first = model(tokens[:, :11])
    middle = model(tokens[:, 11:11], first.state, keep=0)
    last = model(tokens[:, 11:], middle.state, keep=5)
    assert torch.allclose(first.logits, whole.logits[:, :11])
    assert torch.allclose(last.logits, whole.logits[:, -5:])
    assert last.state.position.tolist() == [30, 30]
    assert torch.equal(last.state.layers[0], whole.state.layers[0])
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 256
    differs = (model(changed).logits != whole.logits).any(2).any(0)
    assert differs.nonzero()[:, 0].tolist() == list(range(4, 4 + char_mlp.CONTEXT))


def test_the_baseline_learns_and_is_not_trained_twice(tmp_path: Path) -> None:
    """A few steps lower the loss, and a second call loads the same weights."""
    text = tmp_path / "t.txt"
    text.write_text("the same words again and again, " * 400)
    setting = next(one for one in SETTINGS if one.kind == MLP)
    config = training(setting, None, text, tmp_path / "run", seed=0, steps=60)
    model = char_mlp.train(config, 16)
    tokens = torch.tensor([list(b"the same words again and again, ")])
    found = cross_entropy(model(tokens[:, :-1]).logits[0], tokens[0, 1:])
    assert float(found.detach()) < 4.0  # ln 256 = 5.5
    assert char_mlp.train(config, 16).fingerprint() == model.fingerprint()


def test_settings_are_chosen_by_name() -> None:
    """Settings keep their order; an unknown name and a baseline alone are refused."""
    assert [one.name for one in choose(["mlp-8", "rnn-16"])] == ["rnn-16", "mlp-8"]
    assert choose(None) == SETTINGS
    with pytest.raises(UserError, match=naming("rnn-65", "rnn-64")):
        choose(["rnn-65"])
    with pytest.raises(UserError, match="--setting"):
        choose(["mlp-8"])


@pytest.mark.parametrize(
    ("shorter", "says"),
    [
        ([2.001, 2.101, 2.201], "**Confirmed**"),
        ([1.9, 2.0, 2.1], "**Confirmed**"),  # longer windows hurt: they do not help either
        ([2.1, 2.201, 2.3], "**Refuted**"),
        ([2.0, 2.2, 2.3], "**Inconclusive**"),
    ],
)
def test_verdicts(shorter: list[float], says: str) -> None:
    """The verdict follows from the interval of paired differences."""
    losses = {**OTHERS, "rnn-16": shorter, "rnn-64": [2.0, 2.1, 2.2], "gru-64": [2.1, 2.2, 2.3]}
    first, gru, lstm, _, mlp = verdict(losses)
    assert says in first
    assert gru.endswith("worse.")
    assert "1.0000 [1.0000, 1.0000]" in lstm
    assert mlp.startswith("- mlp-8 compared with rnn-64")
    assert verdict({"rnn-16": shorter, "mlp-8": shorter}) == []
    single = verdict({name: values[:1] for name, values in losses.items()})
    assert "Not judged" in single[0]


@pytest.mark.slow
def test_a_tiny_study(tmp_path: Path) -> None:
    """The study runs from end to end at a small size and can be resumed."""
    (tmp_path / "t.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(6000)))
    command = [sys.executable, "-m", "scripts.study_char_lm", str(tmp_path / "t.txt"), "--quiet"]
    command += ["--steps", "2", "--width", "64", "--output", str(tmp_path / "out")]
    command += ["--report", str(tmp_path / "r.md")]

    def study(seeds: int) -> str:
        done = subprocess.run(
            [*command, "--seeds", str(seeds)],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=REPOSITORY,
            env=ENVIRONMENT,
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "r.md").read_text() == done.stdout
        return done.stdout

    first = study(1)
    for setting in SETTINGS:
        assert f"| {setting.kind} | {setting.window} |" in first
        assert f"\n{setting.name}:\n" in first
    assert "Not judged" in first
    assert "| middle, step 1 | 64 |" in first
    assert "| end, step 2 | 64 |" in first
    assert (tmp_path / "r.png").stat().st_size > 10_000
    models = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoint-*")}
    second = study(2)
    assert "2 seed(s)" in second
    assert "Not judged" not in second
    assert all(path.stat().st_mtime_ns == time for path, time in models.items())
    (tmp_path / "t.txt").write_text("another text\n" * 9000)
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
