"""Part 1: how fast this device copies memory and multiplies matrices. Bounds are relative to it."""

from __future__ import annotations

import torch

from benchmarks.gpu.harness import Bench


def run(bench: Bench) -> None:
    """Measures the two ceilings, and stores them for the other parts."""
    sizes, device = bench.sizes, bench.device

    def copy() -> None:
        source = torch.empty(sizes.copied, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        ms = bench.milliseconds(lambda: target.copy_(source))
        rate = None if ms is None else 2 * sizes.copied / ms * 1e3
        bench.figure("copy in memory, reading and writing", _scaled(rate, 1e12), "TB/s")
        if rate is not None:
            bench.record.ceilings["bytes_per_second"] = rate

    def product() -> None:
        a = torch.randn(sizes.product, sizes.product, device=device).bfloat16()
        b = torch.randn_like(a)
        ms = bench.milliseconds(lambda: a @ b.t())
        rate = None if ms is None else 2 * sizes.product**3 / ms * 1e3
        bench.figure("product of bfloat16 matrices", _scaled(rate, 1e12), "TFLOP/s")
        if rate is not None:
            bench.record.ceilings["flops_per_second"] = rate

    bench.attempt("copy in memory", copy)
    bench.attempt("product of matrices", product)


def _scaled(rate: float | None, unit: float) -> float | None:
    return None if rate is None else rate / unit
