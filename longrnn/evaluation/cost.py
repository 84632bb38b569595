"""Speed, memory and size of the state at each length, measured in a separate process.

The process runs this module: `python -m longrnn.evaluation.cost JOB` prints one JSON object. So
memory of other models and lengths is not included.
"""

from __future__ import annotations

import json
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
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Sample
from longrnn.hf.load import load
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.trie import SCORED_TOKENS
from longrnn.intervals import FIGURE
from longrnn.models.finite import refuse_nonfinite
from longrnn.options import Lengths, Tokens
from longrnn.programs import module_command, module_environment
from longrnn.progress import Progress
from longrnn.results import Row

MIB = 2**20
COLUMNS = {
    "prefill": Column("prefill, tokens/s", FIGURE, ",.0f"),
    "decode": Column("decoding, tokens/s", FIGURE, ",.0f"),
    "peak": Column("peak memory, MiB", FIGURE, ",.0f"),
    "peak_over_model": Column("of it above the model, MiB", FIGURE, ",.0f"),
    "state_bytes": Column("state or cache, bytes", FIGURE, ",.0f"),
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

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        self._unmeasured = {}
        for model in models:
            self._items[model.name] = [
                Item({"length": length}, length)
                for length in self.lengths
                if self.reaches(model, length + self.decode, COLUMNS["prefill"], length)
            ]

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        if not model.source:
            raise UserError(f"{model.name} was built here: save it, and give its folder")
        # Otherwise the process would report it as the reason of one length only.
        tokens = torch.arange(8)[None] % model.model.vocab_size
        refuse_nonfinite(model.model(tokens.to(model.device)).logits, model.model, tokens)
        for item in items:
            job = {"source": model.source, "length": item.spec, **self.protocol(model)}
            measured = in_a_process(job)
            # A failed measurement has no row, so that it is repeated the next time.
            if isinstance(measured, str):
                failed = Sample(COLUMNS["prefill"], item.spec, reason=measured)
                self._unmeasured.setdefault(model.name, []).append(failed)
            else:
                yield [(item, measured)]
            progress.advance(1, item.spec)

    def samples(self, item: Item, row: Row) -> Iterator[Sample]:
        for name, column in COLUMNS.items():
            yield Sample(column, item.spec, value=row[name])


def in_a_process(job: Mapping[str, Any]) -> dict[str, float] | str:
    """Call `measure` with these arguments in a new process; return its result, or an error."""
    module = "longrnn.evaluation.cost"
    done = subprocess.run(
        module_command(module, json.dumps(job)),
        capture_output=True,
        text=True,
        check=False,
        env=module_environment(),
    )
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}, perhaps because memory ran out"
    if done.returncode > 0:
        return f"failed: {''.join(done.stderr.strip().splitlines()[-1:])}"
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
    before = _memory(place)[0]

    begun, state = _clock(place), model.init_state(1)
    logits = torch.empty(0)
    for piece in tokens.split(SCORED_TOKENS, dim=1):
        logits, state = model(piece, state, keep=1)
    read, size = _clock(place), states.nbytes(state)
    for _ in range(decode):
        logits, state = model(logits[:, -1].argmax(-1, keepdim=True), state, keep=1)
    decoded, peak = _clock(place), _memory(place)[1]
    return {
        "prefill": length / (read - begun),
        "decode": decode / (decoded - read),
        "peak": peak / MIB,
        "peak_over_model": (peak - before) / MIB,
        "state_bytes": size,
    }


def _clock(device: str) -> float:
    """Return seconds of wall time, or of CPU time if there is one thread."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.process_time()  # does not depend on other load on the machine
    return time.perf_counter()


def _memory(device: str) -> tuple[int, int]:
    """Return current and peak memory in bytes: of tensors on CUDA, else of this process.

    Raises:
        UserError: the operating system does not report them.
    """
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.is_file():
        raise UserError("memory can be measured only on Linux and on CUDA: use one of them")
    # Not `ru_maxrss`, which starts from the memory of the parent process.
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    now, most = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


if __name__ == "__main__":
    try:
        print(json.dumps(measure(**json.loads(sys.argv[1]))))
    except UserError as error:
        print(json.dumps(str(error)))
