"""Where the Triton kernels run, and what is said where they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longrnn.errors import UserError
from longrnn.ops import triton as kernels


def test_without_triton_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_installed", lambda: False)
    assert not kernels.available()
    with pytest.raises(UserError, match=r"pip install triton"):
        kernels.require()


def test_without_a_gpu_the_kernels_are_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="CUDA"):
        kernels.require()


def test_kernels_refuse_tensors_that_they_cannot_read() -> None:
    """Tensors on another device, and those that torch.func transforms."""
    plain = torch.ones(2, device="cpu" if kernels.interpreting() else "cuda")
    assert kernels.suits([plain, None])
    assert not kernels.suits([plain, plain.to("meta")])
    assert not torch.vmap(lambda one: one * kernels.suits([one]))(plain).any()


@pytest.mark.slow
def test_the_check_of_an_installation_has_the_tests_of_the_kernels() -> None:
    """Where kernels are not interpreted, `-m cuda` selects the tests that run them on the GPU."""
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "cuda", "-n", "0"]
    done = subprocess.run(
        [*command, str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        cwd=folder.parents[2],
    )
    for name in ("recurrence", "limited", "window"):
        assert f"test_{name}.py" in done.stdout, done.stdout[-2000:]
