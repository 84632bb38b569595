"""`longrnn doctor` checks every backend, and says what is missing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from longrnn.cells import MIXERS, Mamba2
from longrnn.cells.self_test import backends
from longrnn.ops.operation import accepts
from longrnn.ops.scan import SCAN
from longrnn.ops.scan.definition import scan
from tests.cli.conftest import CLI


def test_every_backend_of_this_machine_passes(cli: CLI) -> None:
    result = cli("doctor")
    assert result.code == 0, result.err
    assert {"rnn", "gru", "lstm", "mamba3"} < set(MIXERS)
    for cell in MIXERS:
        assert f"layer of {cell} on cpu" in result.out
        assert all(f"│ {backend}" in result.out for backend in backends(cell))
    assert "passed" in result.out
    assert "FAILED" not in result.out
    assert torch.__version__.split("+")[0] in result.out


def off(*arguments: Any, **named: Any) -> Any:
    y, state = scan(*arguments, **named)
    return y, state * (1 + 2e-3)


def nan(*arguments: Any, **named: Any) -> Any:
    y, state = scan(*arguments, **named)
    return y * float("nan"), state


def raising(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("Failed to find C compiler. Please specify via CC.")


@pytest.mark.parametrize("cell", [off, nan, raising])
def test_a_backend_that_fails_is_named(
    cell: Callable[..., Any], cli: CLI, monkeypatch: pytest.MonkeyPatch
) -> None:
    implementations = [
        one._replace(refusal=accepts, run=cell) if one.name == "fla" else one
        for one in SCAN.implementations
    ]
    monkeypatch.setattr(Mamba2, "operation", SCAN._replace(implementations=implementations))
    for name in [name for name in MIXERS if name != "mamba2"]:
        monkeypatch.delitem(MIXERS, name)
    result = cli("doctor")
    assert result.code == 1
    assert "FAILED" in result.out
    assert "fla of mamba2 on cpu" in result.err
    assert all(f"│ {name}" in result.out for name in backends("mamba2"))
