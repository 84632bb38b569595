"""`longrnn doctor` checks every backend, and says what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from longrnn.ops.ssd import BACKENDS, chunked, mamba_ssm, self_test
from typer.testing import CliRunner

from longrnn.cells import mamba2
from longrnn.cells.self_test import layer_self_test
from longrnn.cli import doctor
from longrnn.cli.app import app
from longrnn.ops import native
from tests.ops.ssd.test_mamba_ssm import combined


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
        assert "wrong on cpu" in result.output


def test_a_backend_that_raises_fails_and_the_others_are_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels that cannot be compiled, for example because there is no C compiler."""

    def raising(inputs, state):  # type: ignore[no-untyped-def]
        raise RuntimeError("Failed to find C compiler. Please specify via CC.")

    monkeypatch.setitem(BACKENDS, "uncompiled", raising)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "uncompiled on cpu" in result.output
    assert all(f"│ {name}" in result.output for name in BACKENDS)
    assert "Traceback" not in result.output


def test_wrong_values_around_the_recurrence_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is tested too: its convolution, step sizes and norm have kernels of their own."""
    plain = mamba2.causal_conv

    def off(*arguments, **named):  # type: ignore[no-untyped-def]
        y, state = plain(*arguments, **named)
        return y * (1 + 1e-3 * (y.dtype == torch.float32)), state

    monkeypatch.setattr(mamba2, "causal_conv", off)
    assert not layer_self_test("chunked").passed
    assert "chunked on cpu" in CliRunner().invoke(app, ["doctor"]).output


def test_the_kernels_of_mamba_ssm_are_tested_where_they_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here a loop stands for them, on a CPU."""
    monkeypatch.setattr(mamba_ssm, "combined", lambda: combined)
    monkeypatch.setattr(mamba_ssm, "DEVICES", ("cpu",))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert re.search(r"mamba_ssm │ \S+ passed │ \S+ passed", result.output)

    def off(*arguments, **named):  # type: ignore[no-untyped-def]
        y, final = combined(*arguments, **named)
        return y * 1.1, final

    monkeypatch.setattr(mamba_ssm, "combined", lambda: off)
    assert not self_test.self_test("mamba_ssm").passed
    assert not layer_self_test("mamba_ssm").passed


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can run them")
def test_reasons_for_what_is_not_available() -> None:
    """Each backend that is not in the table has a line with the reason and the remedy."""
    result = CliRunner().invoke(app, ["doctor"])
    assert "mamba_ssm" in result.output


@pytest.mark.parametrize(
    ("built_for", "message"),
    [(None, "torch was built without CUDA: install"), ("13.0", "compare the CUDA version")],
)
def test_a_gpu_that_torch_does_not_use_is_reported(
    built_for: str | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A driver without a device is the commonest broken installation."""
    (tmp_path / "version").touch()
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert message in "\n".join(doctor._advice())


def test_missing_kernels_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.delitem(BACKENDS, "native", raising=False)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "C++" in result.output
    assert "auto: chunked" in result.output
