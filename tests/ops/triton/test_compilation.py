"""The kernels compile for the GPUs that they are written for, without having one.

They must not spill more than 256 bytes per thread, must fit into shared memory, and multiply on
tensor cores. The interpreter finds none of this, nor variables that change their type.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

MOST_SPILLED = 256
# Bytes of shared memory that one program may use.
SHARED = {80: 163 * 1024, 90: 227 * 1024}
# Kernels without a matrix product.
WITHOUT_PRODUCTS = {"passing", "by_token", "limited_by_token", "sliding"}


def results(architecture: int, cases: Sequence[str]) -> list[dict[str, Any]]:
    """What each kernel of some cases uses: see `tests.ops.triton.compiled`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.triton.compiled", str(architecture), *cases]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


FORWARD = ("forward-one", "forward-two", "forward-float32", "forward-float64")
LIMITED = ("limited-one", "limited-two", "limited-float32", "limited-float64")
LIMITED_BACKWARD = ("limited-backward-one", "limited-backward-float32", "limited-backward-float64")
WINDOWED = ("windowed-one", "windowed-two", "windowed-float32", "windowed-float64")
WINDOW_STEP = ("window-step-two", "window-step-float32", "window-step-float64")
BACKWARD = ("backward-one", "backward-float32", "backward-float64")


@pytest.mark.parametrize("architecture", sorted(SHARED))
@pytest.mark.parametrize(
    "cases",
    [
        ("walk-one",),
        *(
            pytest.param(cases, marks=pytest.mark.slow)
            for cases in (
                FORWARD,
                LIMITED,
                LIMITED_BACKWARD,
                WINDOWED,
                WINDOW_STEP,
                BACKWARD,
            )
        ),
    ],
    ids=lambda cases: cases[0],
)
def test_kernels_fit(architecture: int, cases: Sequence[str]) -> None:
    found = results(architecture, cases)
    assert {one["case"] for one in found} == set(cases)
    for one in found:
        assert one["spilled_bytes"] <= MOST_SPILLED, one
        assert one["shared_bytes"] <= SHARED[architecture], one
        products = one["kernel"] not in WITHOUT_PRODUCTS
        assert one["tensor_cores"] == products, one


def test_every_case_is_compiled() -> None:
    listed = {"walk-one", *FORWARD, *LIMITED, *LIMITED_BACKWARD, *WINDOWED, *WINDOW_STEP, *BACKWARD}
    from tests.ops.triton.compiled import CASES

    assert listed == set(CASES)
