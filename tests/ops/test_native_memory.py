"""What the C++ kernels do if there is no memory for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from longrnn.ops import native

SCRIPT = """
import json, resource, torch
from longrnn import Mitigated, RecurrentConfig, RecurrentLM, mitigation

torch.set_num_threads(2)
torch.manual_seed(0)
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
mamba2 = {"kind": "mamba2", "d_state": 2048, "head_dim": 32, "expand": 1, "backend": "native"}
wide = RecurrentLM(RecurrentConfig(16, 256, 1, mamba2))
lstm = RecurrentLM(RecurrentConfig(16, 1024, 1, {"kind": "lstm"}))
models = [
    wide,
    Mitigated(wide, mitigation("state_norm(threshold=0.1)")),
    Mitigated(lstm, mitigation("forget_more(decay_scale=0.9)")),
]
ids, refused = torch.randint(16, (1, 256)), []

@torch.no_grad()
def run(model):
    return model(ids, keep=1).logits

for model in models:
    wanted = run(model)
    for left in range(20, 0, -1):  # MiB, for torch and the kernels
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + left * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        try:
            assert torch.equal(run(model), wanted)
        except MemoryError as error:
            refused.append(str(error))
        except RuntimeError as error:  # of torch
            assert "memory" in str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert torch.equal(run(model), wanted)
print(json.dumps(refused))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are set by /proc")
@pytest.mark.skipif(not native.available(), reason=str(native.missing()))
def test_a_kernel_without_memory_raises_and_can_be_called_again() -> None:
    """The process goes on, and results are right again as soon as there is memory."""
    # Freed blocks return to the system at once, so that a limit applies to the next ones.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-1000:]
    kernels = {f"in the kernel longrnn_{name}_f32" for name in ("cell", "limited_scan", "stepwise")}
    assert set(json.loads(done.stdout)) == kernels
