"""Speed, memory and size of the state at each length, measured in a separate process.

The process runs this module: `python -m longrnn.evaluation.cost JOB` prints one JSON object. So
memory of other models and lengths is not included.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field

from longrnn import state as states
from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Plan, Sample, within
from longrnn.hf.load import load
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.trie import SCORED_TOKENS
from longrnn.intervals import MEAN
from longrnn.models.finite import refuse_nonfinite
from longrnn.options import Lengths, Tokens
from longrnn.programs import module_command, module_environment
from longrnn.progress import Progress
from longrnn.results import Row

logger = logging.getLogger(__name__)

MODULE = "longrnn.evaluation.cost"
MIB = 2**20
COLUMNS = {
    "prefill": Column("prefill, tokens/s", MEAN, ",.0f"),
    "decode": Column("decoding, tokens/s", MEAN, ",.0f"),
    "peak": Column("peak memory, MiB", MEAN, ",.0f"),
    "state_bytes": Column("state or cache, bytes", MEAN, ",.0f"),
}


class Cost(Evaluation):
    """Speed, memory and size of the state at each length, one sequence at a time."""

    kind: ClassVar[str] = "cost"
    reads_text: ClassVar[bool] = False
    # The other processes would slow the measurement down.
    sharing: ClassVar[str] = "main"

    # Numbers of tokens to read, and tokens to generate after that.
    lengths: Lengths = Field([256, 1024, 4096])
    decode: Tokens = 32

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return {
            "device": model.device,
            "threads": torch.get_num_threads(),
            "decode": self.decode,
            "seed": self.seed,
        }

    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        tokens = {length: length + self.decode for length in self.lengths}
        fitting = [within(model, tokens, COLUMNS["prefill"]) for model in models]
        return [
            Plan([Item({"length": length}, length) for length in reached], beyond)
            for reached, beyond in fitting
        ]

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        if not model.source:
            raise UserError(f"{model.name} was built here: save it, and give its folder")
        # Otherwise the process would fail at every length.
        tokens = torch.arange(8)[None] % model.model.vocab_size
        refuse_nonfinite(model.model(tokens.to(model.device)).logits, model.model, tokens)
        for item in items:
            job = {"source": model.source, "length": item.spec, **self.protocol(model)}
            try:
                yield [(item, in_a_process(job))]
            except UserError as error:  # memory may be enough for the others
                logger.warning(f"{self.title} of {model.name} at {item.spec:,} tokens: {error}")
            progress.advance(1, item.spec)

    def samples(self, item: Item, row: Row) -> Iterator[Sample]:
        for name, column in COLUMNS.items():
            yield Sample(column, item.spec, value=row[name])


def in_a_process(job: Mapping[str, Any]) -> dict[str, float]:
    """Call `measure` with these arguments in a new process, and return its result.

    Raises:
        UserError: the process failed.
    """
    done = subprocess.run(
        module_command(MODULE, json.dumps(job)),
        capture_output=True,
        text=True,
        check=False,
        env=module_environment(MODULE),
    )
    if done.returncode:
        reason = f"exit code {done.returncode}, perhaps because memory ran out"
        raise UserError("".join(done.stderr.strip().splitlines()[-1:]) or reason)
    return json.loads(done.stdout)


@torch.no_grad()
def measure(
    source: str, device: str, threads: int, length: int, decode: int, seed: int
) -> dict[str, float]:
    """Measure in this process, which must not have done anything else.

    Args:
        source: a checkpoint as `load` takes it.
        device: the device of the model.
        threads: number of threads of torch.
        length: tokens to read.
        decode: tokens to generate after that.
        seed: seed of the tokens.

    Returns:
        By the names of COLUMNS. Decoding is greedy, one token per call; the peak is that of the
        whole process, or on CUDA of the tensors; the state is that after the prefill.
    """
    torch.set_num_threads(threads)
    model = load(source, device=device)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, (1, length), generator=generator)
    # A model that is divided among devices reads tokens on the first of them.
    place = str(model.init_state(1).position.device)
    tokens = tokens.to(place)
    model(tokens[:, :8], keep=1)

    begun, state = _clock(place), model.init_state(1)
    logits = torch.empty(0)
    for piece in tokens.split(SCORED_TOKENS, dim=1):
        logits, state = model(piece, state, keep=1)
    read, size = _clock(place), states.nbytes(state)
    for _ in range(decode):
        logits, state = model(logits[:, -1].argmax(-1, keepdim=True), state, keep=1)
    return {
        "prefill": length / (read - begun),
        "decode": decode / (_clock(place) - read),
        "peak": _peak_memory(place) / MIB,
        "state_bytes": size,
    }


def _clock(device: str) -> float:
    """Return seconds of wall time, or of CPU time if there is one thread."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.process_time()  # does not depend on other load on the machine
    return time.perf_counter()


def _peak_memory(device: str) -> int:
    """Return the peak memory in bytes: of tensors on CUDA, else of this process, on Linux."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    # Not `ru_maxrss`, which starts from the memory of the parent process.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
