"""Optimizers and learning rates. A learning rate is a function of the step and has no state."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from longrnn.errors import UserError, nearest
from longrnn.training.config import TrainConfig

OPTIMIZERS: dict[str, type[torch.optim.Adam]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
}


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer, with weight decay on matrices only.

    Biases, norms and Mamba-2's A_log, dt_bias and D are vectors and are not decayed.
    """
    if config.optim not in OPTIMIZERS:
        raise UserError(f"unknown optim {config.optim!r}: {nearest(config.optim, OPTIMIZERS)}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return OPTIMIZERS[config.optim](
        groups,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def constant(step: int, config: TrainConfig) -> float:
    """1."""
    return 1.0


def cosine(step: int, config: TrainConfig) -> float:
    """Half a cosine from 1 after the warm-up to 0 at the end."""
    span = max(1, config.max_steps - config.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - config.warmup_steps) / span)))


def warmup_stable_decay(step: int, config: TrainConfig) -> float:
    """1, then linearly to 0 over the last `decay_steps`."""
    return min(1.0, (config.max_steps - step) / max(1, config.decay_steps))


SCHEDULES: dict[str, Callable[[int, TrainConfig], float]] = {
    "constant": constant,
    "cosine": cosine,
    "warmup_stable_decay": warmup_stable_decay,
}


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of step `step`, counted from 0."""
    kind = config.lr_scheduler_type
    if kind not in SCHEDULES:
        raise UserError(f"unknown lr_scheduler_type {kind!r}: {nearest(kind, SCHEDULES)}")
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    return config.learning_rate * SCHEDULES[kind](step, config)
