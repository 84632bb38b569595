"""Speed, and the memory that a context takes, at each length, one sequence at a time."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from longrnn import state as states
from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.evaluation.base import Batches, Evaluation, Item, Plan, Sample, within
from longrnn.evaluation.options import CostOptions
from longrnn.inference.trie import SCORED_TOKENS
from longrnn.intervals import MEAN
from longrnn.models import LanguageModel
from longrnn.models.finite import refuse_nonfinite
from longrnn.progress import Progress
from longrnn.reporting.tables import Column
from longrnn.results import Result
from longrnn.seeds import seeded

MIB = 2**20
COST_COLUMNS = {
    "prefill": Column("prefill, tokens/s", MEAN, ",.0f"),
    "first": Column("seconds to the first token", MEAN, ",.2f"),
    "decode": Column("decoding, tokens/s", MEAN, ",.0f"),
    "state_bytes": Column("state or cache, bytes", MEAN, ",.0f"),
    "peak": Column("peak of the GPU above the model, MiB", MEAN, ",.0f"),
}


class Cost(Evaluation[CostOptions]):
    """Speed, size of the state or cache, and on a GPU the peak memory of tensors."""

    # Other processes would slow the measurement down.
    alone = True

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        threads = torch.get_num_threads()
        return {"device": model.device, "threads": threads, "decode": self.options.decode}

    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        tokens = {length: length + self.options.decode for length in self.options.lengths}
        fitting = [within(model, tokens, COST_COLUMNS["prefill"]) for model in models]
        return [
            Plan([Item({"length": length}, length) for length in reached], reasons)
            for reached, reasons in fitting
        ]

    def measure(self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress) -> Batches:
        for item in items:
            yield [(item, measure(model.model, item.spec, self.options.decode))]
            progress.advance(1, item.spec)

    def samples(self, item: Item, result: Result) -> Iterator[Sample]:
        values = {**result, "first": item.spec / result["prefill"]}
        for name, column in COST_COLUMNS.items():
            if name in values:
                yield Sample(column, item.spec, "", values[name])


@torch.no_grad()
def measure(model: LanguageModel, length: int, decode: int) -> dict[str, float]:
    """Return the cost of reading `length` tokens and of generating `decode` after them, by column.

    Decoding is greedy, one token per call; the state is that after the prefill.
    """
    place = model.init_state(1).position.device
    tokens = torch.randint(model.vocab_size, (1, length), generator=seeded(0)).to(place)
    first, on_gpu = tokens[:, :8], place.type == "cuda"
    refuse_nonfinite(model(first, keep=1).logits, model, first)
    allocated = torch.cuda.memory_allocated(place) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(place)

    begun, state = _clock(place), model.init_state(1)
    logits = torch.empty(0)
    for piece in tokens.split(SCORED_TOKENS, dim=1):
        logits, state = model(piece, state, keep=1)
    read, size = _clock(place), states.nbytes(state)
    for _ in range(decode):
        logits, state = model(logits[:, -1].argmax(-1, keepdim=True), state, keep=1)
    cost = {
        "prefill": length / (read - begun),
        "decode": decode / (_clock(place) - read),
        "state_bytes": float(size),
    }
    if on_gpu:
        cost["peak"] = (torch.cuda.max_memory_allocated(place) - allocated) / MIB
    return cost


def _clock(device: torch.device) -> float:
    """Return seconds of wall time, or of CPU time if there is one thread."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.process_time()  # does not depend on other load on the machine
    return time.perf_counter()
