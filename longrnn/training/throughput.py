"""Tokens per second, model FLOPs utilisation and peak memory of a training run.

Model FLOPs utilisation (MFU) is the share of a device's peak that the operations of the model need:
tokens/s · operations per token / (devices · peak), as in PaLM (arXiv 2204.02311, appendix B).
Operations that a run adds, such as those of gradient checkpointing, do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from longrnn.cells import ScanningCell
from longrnn.models import RecurrentLM
from longrnn.tasks import Batch

# Peak operations per second of bfloat16 matrix products with dense matrices, by a part of the name
# that torch reports, longer names first; from NVIDIA's data sheets of these devices. Where a sheet
# gives a figure with sparsity only, half of it.
PEAKS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "L40S": 362e12,
    "L4": 121e12,
}
# Operations of a training step per multiplication by a weight: two in the forward pass, two for the
# gradient of the input, and two for that of the weight.
FORWARD, GRAD_INPUT, GRAD_WEIGHT = 2, 2, 2


def peak_of(device_name: str) -> float | None:
    """Peak bfloat16 operations per second of a device; None if PEAKS does not have it."""
    words = device_name.replace("-", " ").split()
    for name in sorted(PEAKS, key=len, reverse=True):
        if all(word in words for word in name.split()):
            return PEAKS[name]
    return None


def flops_per_token(model: RecurrentLM, scored_share: float = 1.0) -> float:
    """Operations that a training step needs per token: products with weights, and recurrences.

    Args:
        model: the model in training; a weight that is not trained needs no gradient of its own.
        scored_share: share of the tokens for which logits are computed.
    """
    head = model.head.weight
    lookups = {id(model.embedding.weight), *map(id, model.position.parameters())} - {id(head)}
    total = 0.0
    for weight in model.parameters():
        if weight.ndim >= 2 and id(weight) not in lookups:
            trained = GRAD_WEIGHT if weight.requires_grad else 0
            share = scored_share if weight is head else 1.0
            total += share * (FORWARD + GRAD_INPUT + trained) * weight.numel()
    for mixer in model.cells:
        if isinstance(mixer, ScanningCell):
            # Per entry of the state, one product to update it and one to read it out.
            state = mixer.memory(mixer.state_like()).numel()
            total += 2 * (FORWARD + GRAD_INPUT + GRAD_WEIGHT) * state
    return total


class Throughput:
    """Measures one step, without the evaluation or the checkpoint after it.

    Args:
        model: the model in training.
        device: on which this process trains.
        processes: how many processes train, each on its own device.
        mixed_precision: of the run; MFU is relative to products in bfloat16 or float16.
        say: receives one line if MFU cannot be given on this GPU.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        processes: int,
        mixed_precision: str,
        say: Callable[[str], None],
    ) -> None:
        self._model = model if isinstance(model, RecurrentLM) else None
        self._device, self._processes = device, processes
        self._peak = self._find_peak(mixed_precision, say)
        self.start()

    def _find_peak(self, mixed_precision: str, say: Callable[[str], None]) -> float | None:
        if self._device.type != "cuda":
            return None
        if self._model is None or mixed_precision == "no":
            say("model FLOPs utilisation is given for recurrent models under bf16 or fp16 only")
            return None
        name = torch.cuda.get_device_name(self._device)
        peak = peak_of(name)
        if peak is None:
            say(f"model FLOPs utilisation is left out, because the peak of {name} is not known")
        return peak

    def start(self) -> None:
        """A step begins."""
        self._begun, self._seconds = time.monotonic(), 0.0
        self._tokens = self._scored = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def add(self, batch: Batch) -> None:
        """Counts a batch of this process, whose tensors are on the CPU."""
        self._tokens += batch.tokens.numel()
        self._scored += int((batch.targets >= 0).sum())

    def stop(self) -> None:
        """The step has ended."""
        self._seconds = time.monotonic() - self._begun

    def row(self) -> dict[str, float]:
        """Metrics of all processes from `start` to `stop`.

        Returns:
            `tokens_per_second`; on a GPU also `peak_memory_gib` of this process's tensors, and
            `mfu` if it is known.
        """
        seconds, tokens = self._seconds, self._tokens * self._processes
        row = {"tokens_per_second": tokens / seconds}
        if self._peak is not None and self._model is not None and self._tokens:
            per_token = flops_per_token(self._model, self._scored / self._tokens)
            row["mfu"] = self._tokens * per_token / seconds / self._peak
        if self._device.type == "cuda":
            row["peak_memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return row
