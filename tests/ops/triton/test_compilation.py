"""The kernels compile for the GPUs that they are written for, without having one.

They must not spill more than 256 bytes per thread, must fit into shared memory, and multiply on
tensor cores. The interpreter finds none of this, nor variables that change their type.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

MOST_SPILLED = 256
# Bytes of shared memory that one program may use.
SHARED = {80: 163 * 1024, 90: 227 * 1024}
# Kernels without a matrix product.
WITHOUT_PRODUCTS = {"passing", "by_token", "limited_by_token", "sliding"}


def results(architecture: int, case: str) -> list[dict[str, Any]]:
    """What each kernel of a case uses: see `tests.ops.triton.compiled`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.triton.compiled", str(architecture), case]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("architecture", sorted(SHARED))
@pytest.mark.parametrize(
    "case",
    [
        "walk-one",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                "forward-one",
                "forward-two",
                "forward-float32",
                "forward-float64",
                "limited-two",
                "limited-float32",
                "limited-float64",
                "windowed-one",
                "windowed-two",
                "windowed-float32",
                "windowed-float64",
                "backward-one",
                "backward-float32",
                "backward-float64",
            )
        ),
    ],
)
def test_kernels_fit(architecture: int, case: str) -> None:
    found = results(architecture, case)
    assert found
    for one in found:
        assert one["spilled_bytes"] <= MOST_SPILLED, one
        assert one["shared_bytes"] <= SHARED[architecture], one
        products = one["kernel"] not in WITHOUT_PRODUCTS
        assert one["tensor_cores"] == products, one
