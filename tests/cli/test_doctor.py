"""`longrnn doctor` checks every backend, and says what is missing."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from longrnn.cli.app import app
from longrnn.ops import native
from longrnn.ops.ssd import BACKENDS, chunked, self_test


def test_every_backend_of_this_machine_passes() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for backend in BACKENDS:
        assert backend in result.output
    assert "passed" in result.output
    assert "FAILED" not in result.output
    assert torch.__version__.split("+")[0] in result.output


def test_a_backend_with_wrong_results_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is off by a hundred-thousandth, or NaN, in output, state or gradients."""

    def off(inputs, state):  # type: ignore[no-untyped-def]
        y, final = chunked.ssd(inputs, state)
        return y, final * (1 + 3e-5)

    def broken(inputs, state):  # type: ignore[no-untyped-def]
        y, final = chunked.ssd(inputs, state)
        return y * float("nan"), final

    for wrong in (off, broken):
        monkeypatch.setitem(BACKENDS, "wrong", wrong)
        assert not self_test.self_test("wrong").passed
        result = CliRunner().invoke(app, ["doctor"])
        assert result.exit_code == 1
        assert "FAILED" in result.output


def test_missing_kernels_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.delitem(BACKENDS, "native", raising=False)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "C++" in result.output
    assert "auto: chunked" in result.output
