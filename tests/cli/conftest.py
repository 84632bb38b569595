"""The command line run in this process, and tiny checkpoints for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest
import torch

from longrnn.cli.app import run
from longrnn.config import build_config
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.models.checkpoint import save_model
from tests.training.runs import LSTM, tiny, train


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class CLI(Protocol):
    def __call__(self, *arguments: str | Path) -> Outcome: ...


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `text` (a model of bytes) and `backwards` (a short training run on reverse)."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    save_model(RecurrentLM(build_config(RecurrentConfig, LSTM)), root / "text")
    train(tiny("reverse", root / "backwards", max_steps=4))
    return root


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> CLI:
    """Runs `longrnn …` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["longrnn", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            run()
        code = leaving.value.code
        assert code is None or isinstance(code, int)
        return Outcome(code or 0, *capsys.readouterr())

    return call
