"""The kernels beside the recurrence compile for the GPUs that are supported, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from tests.ops.triton.compiled_around import CASES

# Bytes of shared memory that one program may use.
SHARED = {"80": 163 * 1024, "90": 227 * 1024}


@pytest.mark.parametrize("architecture", ["90", pytest.param("80", marks=pytest.mark.slow)])
def test_kernels_fit_into_registers_and_shared_memory(architecture: str) -> None:
    """For the sizes of Mamba-2 2.7B, in bfloat16 and float32."""
    without = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.triton.compiled_around", architecture, *CASES]
    done = subprocess.run(command, env=without, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["case"] for one in found} == set(CASES)
    for one in found:
        assert one["spilled_bytes"] <= 256, one
        assert one["shared_bytes"] <= SHARED[architecture], one
