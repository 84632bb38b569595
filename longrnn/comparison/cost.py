"""Speed, memory and size of the state of one model at one length, in a process of its own.

The process is this module: `python -m longrnn.comparison.cost JOB` prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from longrnn import state as states
from longrnn.errors import UserError
from longrnn.hf.loading import load
from longrnn.inference.prefill import SCORED_TOKENS
from longrnn.programs import module_command, module_environment

MIB = 2**20


class Job(NamedTuple):
    """One measurement.

    Attributes:
        source: for `load`.
        device: where it runs.
        threads: of torch.
        length: tokens to read.
        decode: tokens to generate then.
        seed: of the tokens.
    """

    source: str
    device: str
    threads: int
    length: int
    decode: int
    seed: int


def in_a_process(job: Job) -> dict[str, float] | str:
    """Measures in a new process; what `measure` returns, or why there is nothing."""
    module = "longrnn.comparison.cost"
    done = subprocess.run(
        module_command(module, json.dumps(job)),
        capture_output=True,
        text=True,
        check=False,
        env=module_environment(module),
    )
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}, as a process is that has no memory left"
    if done.returncode > 0:
        last = done.stderr.strip().splitlines()[-1:]
        return f"failed: {' '.join(last)}"
    found = json.loads(done.stdout)
    return found if isinstance(found, str) else {name: float(found[name]) for name in found}


@torch.no_grad()
def measure(job: Job) -> dict[str, float]:
    """Measures in this process, which must have done nothing else.

    Returns:
        `prefill_tokens_per_second`, `decode_tokens_per_second` (greedy, one token a call),
        `peak_mib` (of the whole process; on CUDA, of the tensors), `peak_over_model_mib` (what of
        it came on top of the loaded model), `state_bytes` (after the prefill, of one sequence).
    """
    torch.set_num_threads(job.threads)
    model = load(job.source, device=job.device)
    generator = torch.Generator().manual_seed(job.seed)
    tokens = torch.randint(model.vocab_size, (1, job.length), generator=generator)
    tokens = tokens.to(job.device)
    model(tokens[:, :8], keep=1)
    before = _memory(job.device)[0]

    begun, state, logits = _clock(job.device), model.init_state(1), None
    for piece in tokens.split(SCORED_TOKENS, dim=1):
        logits, state = model(piece, state, keep=1)
    read, size = _clock(job.device), states.nbytes(state)
    assert logits is not None
    for _ in range(job.decode):
        logits, state = model(logits[:, -1].argmax(-1, keepdim=True), state, keep=1)
    decoded, peak = _clock(job.device), _memory(job.device)[1]
    return {
        "prefill_tokens_per_second": job.length / (read - begun),
        "decode_tokens_per_second": job.decode / (decoded - read),
        "peak_mib": peak / MIB,
        "peak_over_model_mib": (peak - before) / MIB,
        "state_bytes": size,
    }


def _clock(device: str) -> float:
    """Seconds: by the wall, or of this processor where one thread does all the work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.process_time()  # a busy machine gives figures too
    return time.perf_counter()


def _memory(device: str) -> tuple[int, int]:
    """Bytes held now, and at most so far: of tensors on CUDA, else of this process.

    Raises:
        UserError: a system that does not tell.
    """
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.is_file():
        raise UserError("memory can be measured only on Linux and on CUDA: use one of them")
    # Not `ru_maxrss`, which begins at what the parent held.
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    now, most = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


def _main() -> None:
    try:
        found = measure(Job(*json.loads(sys.argv[1])))
    except UserError as error:
        found = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
