"""Part 6: a training step of the full model in bfloat16, with checkpointing over time."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks.gpu.harness import Bench
from benchmarks.gpu.inputs import randomness
from longrnn.models import RecurrentLM
from longrnn.tasks import Batch
from longrnn.training.config import TrainConfig
from longrnn.training.memory import training_memory
from longrnn.training.objective import Objective
from longrnn.training.optim import build_optimizer
from longrnn.training.throughput import flops_per_token

CHECKPOINTING = "segment"
# So small that the loss of the same batch falls.
LEARNING_RATE = 1e-5


def run(bench: Bench) -> None:
    """One optimizer step of consecutive segments of one row each, and its memory."""
    bench.attempt("training step", partial(_step, bench), seconds=60)


def _batch(bench: Bench) -> Batch:
    sizes = bench.sizes
    shape = (sizes.train_rows, sizes.train_tokens + 1)
    draw = randomness(bench.device, 6)
    ids = torch.randint(sizes.vocab_size, shape, device=bench.device, generator=draw)
    begins = torch.ones(sizes.train_rows, dtype=torch.bool, device=bench.device)
    return Batch(ids[:, :-1], ids[:, 1:], begins)


def _step(bench: Bench) -> None:
    """Forward, backward, clipping and AdamW, as in `longrnn train` with mixed_precision=bf16."""
    sizes, device = bench.sizes, bench.device
    shape = f"{sizes.train_rows} × {sizes.train_tokens:,}"
    expected = training_memory(
        sizes.config,
        rows=sizes.train_rows,
        tokens=sizes.train_tokens,
        mixed_precision="bf16",
        gradient_checkpointing=CHECKPOINTING,
        device=device.type,
    )
    if not bench.fits(f"training step of {shape}", expected.total):
        return
    torch.manual_seed(0)
    with device:
        model = RecurrentLM(sizes.config).train()
    model.gradient_checkpointing_enable(CHECKPOINTING)
    objective, batch = Objective(model), _batch(bench)
    optimizer = build_optimizer(model, TrainConfig(learning_rate=LEARNING_RATE))
    losses: list[float] = []

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            output = objective([batch], model.init_state(sizes.train_rows))
        output.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())

    step()  # compiles kernels and creates the moments of AdamW
    bench.reset_peak()
    ms = bench.on_host(step)
    tokens = batch.tokens.numel()
    flops = tokens * flops_per_token(model)
    rates = (None, None) if ms is None else (tokens / ms * 1e3, flops / ms * 1e3)
    bench.figure(f"training step of {shape}", ms, "ms")
    bench.figure("training step, speed", rates[0], "tokens/s")
    ceiling = bench.record.ceilings.get("flops_per_second")
    share = None if rates[1] is None or ceiling is None else rates[1] / ceiling
    bench.figure("training step, FLOPs ÷ the measured ceiling", share, "share")
    formula = expected.total / 2**30
    bench.compare(
        "training step, peak memory", bench.peak_gib(), formula, "the formula", unit="GiB"
    )
    bench.check("training step, loss of the second ÷ the first", losses[1] / losses[0], 1.0)
