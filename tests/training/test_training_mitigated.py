"""Training under a mitigation: the recurrence of inference is trained, saved and named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import Mitigated, load, mitigation
from longrnn.errors import UserError
from longrnn.hf.load import load_recurrent
from longrnn.models import RecurrentLM
from longrnn.training.trainer import Trainer
from tests.training.forks import pair
from tests.training.runs import assert_same_run, crash, metrics, tiny, train, write_config
from tests.training.test_validation import HELD_OUT

WINDOW = "sliding_window(window=24)"
VALIDATED: dict[str, Any] = {
    "validation": {"kind": "text", "files": [HELD_OUT]},
    "eval_length": 200,
    "eval_samples": 2,
}


def test_the_loss_is_that_of_the_mitigated_model(tmp_path: Path) -> None:
    """A step, and a validation, compute the recurrence that runs at inference."""
    config = tiny("streams", tmp_path, mitigation=WINDOW, **VALIDATED)
    trainer = train(config)
    model = load(tmp_path)
    assert isinstance(model, Mitigated)
    assert str(model.mitigation) == WINDOW
    assert trainer.validation is not None
    rows = trainer.validation.rows
    with torch.no_grad():
        logits = model(rows.tokens).logits
        plain = load_recurrent(f"{tmp_path}+none")(rows.tokens).logits
    wanted = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows.targets)
    other = torch.nn.functional.cross_entropy(plain.transpose(1, 2), rows.targets)
    found = metrics(tmp_path)[-2]["eval_loss"]
    assert found == pytest.approx(float(wanted), rel=1e-5)
    assert abs(float(other) - found) > 1e-5


@pytest.mark.parametrize("kind", ["streams", "pass"])
def test_a_resumed_run_carries_the_mitigation(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Carries of the mitigation are in checkpoints: the resumed run is the undisturbed one."""
    spec = WINDOW if kind == "streams" else {"kind": "state_norm", "threshold": 0.5}
    straight, broken = (tiny(kind, tmp_path / name, mitigation=spec) for name in ("a", "b"))
    train(straight)
    crash(broken, 6, monkeypatch)
    train(broken, resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    train(tiny(kind, tmp_path / "plain"))
    assert metrics(tmp_path / "plain")[-1]["loss"] != metrics(tmp_path / "a")[-1]["loss"]


def test_two_processes_train_a_mitigation_like_one(tmp_path: Path) -> None:
    """Two processes have the losses of one under a mitigation."""
    changes = {"mitigation": WINDOW, "max_steps": 3, "logging_steps": 1}
    train(tiny("streams", tmp_path / "one", per_device_train_batch_size=4, **changes))
    two = tiny("streams", tmp_path / "two", num_processes=2, **changes)
    path = write_config(two, tmp_path / "config.yaml")
    both = pair("train", path, "--quiet", folder=tmp_path / "log")
    assert [process.end() for process in both] == [0, 0], both[0].err + both[1].err
    for one, other in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)


def test_another_recurrence_than_the_trained_one_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A named mitigation takes the place of that of the training, with a warning."""
    train(tiny("streams", tmp_path, mitigation=WINDOW, max_steps=1))
    with caplog.at_level(logging.WARNING):
        assert str(load(tmp_path).mitigation) == WINDOW  # type: ignore[union-attr]
        load(f"{tmp_path}+{WINDOW}")
        assert isinstance(load(f"{tmp_path}+none"), RecurrentLM)
        assert not caplog.records
        load(f"{tmp_path}+forget_more")
    (record,) = caplog.records
    assert f"was trained under {WINDOW} and is used under forget_more" in record.message


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("fitted_noise", {"mitigation": WINDOW}, "sliding_window"),
        ("streams", {"mitigation": "sliding_windw"}, "sliding_window"),
        ("pass", {"mitigation": "scale_delta(scale=2)"}, "lstm"),
    ],
)
def test_a_mitigation_that_does_not_fit_is_refused(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A mitigation that is not defined for the run is refused before anything is written."""
    with pytest.raises(UserError, match=message):
        Trainer(tiny(kind, tmp_path / "run", **changes), quiet=True)
    assert not (tmp_path / "run").exists()


def test_the_saved_spec_has_no_calibration(tmp_path: Path) -> None:
    """The spec of a trained model applies to its new weights."""
    spec = [{"kind": "state_norm", "threshold": 0.5}, "forget_more(decay_scale=0.999)"]
    train(tiny("streams", tmp_path, mitigation=spec, max_steps=1))
    recorded = load_recurrent(f"{tmp_path}+none").trained_under
    assert recorded == mitigation(spec).describe()


def test_a_run_records_its_own_mitigation_and_not_that_of_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training without the mitigation of `init_from` is reported, and the result records none."""
    first, then = tmp_path / "first", tmp_path / "then"
    train(tiny("streams", first, mitigation=WINDOW, max_steps=1))
    for own in (None, WINDOW):
        config = tiny("streams", then / str(own), max_steps=1, mitigation=own)
        config.model, config.init_from = None, str(first)
        capsys.readouterr()
        Trainer(config).train()
        assert load_recurrent(f"{then / str(own)}+none").trained_under == own
        warning = f"trained under {WINDOW}, and this run trains without it"
        assert (warning in capsys.readouterr().err) == (own is None)
