"""Measurements by `llama-bench` of llama.cpp, in processes of its own.

The model is a file that `convert_hf_to_gguf.py` of llama.cpp writes from a checkpoint that
`longrnn convert --to hf` wrote.
"""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

# Tokens of one run of decoding: so many that loading the model does not hide their time.
DECODED = 32
PARTS = {"prefill": "-p", "decode": "-n"}


class Peer(NamedTuple):
    """`binary`, and `folder` with the model as `float32.gguf` and `bfloat16.gguf`."""

    binary: str
    folder: Path

    def timers(self, part: str, dtype: str, tokens: int) -> dict[str, Callable[[], float]]:
        """A function that returns the seconds of the same work; none without a model.

        Args:
            part: one of `PARTS`.
            dtype: of the weights.
            tokens: that are read or generated.
        """
        model = self.folder / f"{dtype}.gguf"
        if part not in PARTS or not model.exists():
            return {}
        count = DECODED if part == "decode" else tokens
        return {"llama.cpp": lambda: self._seconds(model, part, count) * tokens / count}

    def _seconds(self, model: Path, part: str, count: int) -> float:
        """Wall time, or with one thread processor time, as for the other contenders."""
        if torch.get_num_threads() > 1:
            return self._run(model, part, count, 1)[0]
        # Loading takes processor time too: it is the same with one repetition and with two.
        once, twice = (self._run(model, part, count, repeats)[1] for repeats in (1, 2))
        return twice - once

    def _run(self, model: Path, part: str, count: int, repeats: int) -> tuple[float, float]:
        """Seconds per repetition as the program measures them, and its processor time."""
        other = PARTS["decode" if part == "prefill" else "prefill"]
        command = [self.binary, "-m", str(model), PARTS[part], str(count), other, "0"]
        command += ["-t", str(torch.get_num_threads()), "-r", str(repeats), "-o", "json"]
        before = _processor_time()
        done = subprocess.run(
            [*command, "--no-warmup"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
        )
        (found,) = json.loads(done.stdout)
        return found["avg_ns"] / 1e9, _processor_time() - before


def _processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
