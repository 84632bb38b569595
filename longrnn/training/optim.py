"""Optimizers and learning rates. A learning rate is a function of the step and has no state."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from longrnn.errors import UserError, nearest
from longrnn.training.config import TrainConfig

OPTIMIZERS: dict[str, type[torch.optim.Adam]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
}


# Never decayed, however many axes they have: what sets time scales, what scales, what shifts.
UNDECAYED = ("*A_log", "*dt_bias", "*.D", "*norm.weight", "*bias*")


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, kernels, embeddings and tables of positions.

    Biases, norms and Mamba-2's A_log, dt_bias and D are left alone.
    """
    return parameter.ndim >= 2 and not any(fnmatchcase(name, pattern) for pattern in UNDECAYED)


@torch.no_grad()
def fill(model: nn.Module, values: Mapping[str, float]) -> None:
    """Sets the parameters that a pattern matches to its number, pattern after pattern.

    Raises:
        UserError: a pattern matches nothing.
    """
    for pattern, value in values.items():
        for parameter in _matching(model, pattern, "fill"):
            parameter.fill_(value)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Takes the parameters that any of `patterns` matches out of training.

    Raises:
        UserError: a pattern matches nothing, or all of them together match everything.
    """
    for pattern in patterns:
        for parameter in _matching(model, pattern, "freeze"):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"freeze={list(patterns)} leaves nothing to train: name fewer parameters")


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of what is not frozen, in groups of one weight decay and learning rate each.

    A group's `scale` is the factor of `config.learning_rate_scale`; see `set_learning_rate`.

    Raises:
        UserError: an unknown optimizer, or a pattern that matches nothing.
    """
    if config.optim not in OPTIMIZERS:
        raise UserError(f"unknown optim {config.optim!r}: {nearest(config.optim, OPTIMIZERS)}")
    scales = {}
    for pattern, factor in config.learning_rate_scale.items():
        matched = _matching(model, pattern, "learning_rate_scale")
        scales |= dict.fromkeys(matched, factor)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = config.weight_decay if decays(name, parameter) else 0.0
            groups.setdefault((decay, scales.get(parameter, 1.0)), []).append(parameter)
    return OPTIMIZERS[config.optim](
        [
            {"params": parameters, "weight_decay": decay, "scale": scale}
            for (decay, scale), parameters in groups.items()
        ],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def _matching(model: nn.Module, pattern: str, key: str) -> list[nn.Parameter]:
    """The parameters whose name `pattern` matches; a tied head is found by both of its names.

    Raises:
        UserError: there is none.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    found = [parameter for name, parameter in named.items() if fnmatchcase(name, pattern)]
    if not found:
        # Names as patterns, so that a deep model does not list each of its layers.
        known = {re.sub(r"\.\d+\.", ".*.", name) for name in named}
        known |= {f"*.{name.rpartition('.')[2]}" for name in named}
        raise UserError(f"{key}: no parameter matches {pattern!r}: {nearest(pattern, known)}")
    return found


def constant(step: int, config: TrainConfig) -> float:
    """1."""
    return 1.0


def cosine(step: int, config: TrainConfig) -> float:
    """Half a cosine from 1 after the warm-up to 0 at the end."""
    span = max(1, config.max_steps - config.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - config.warmup_steps) / span)))


def linear(step: int, config: TrainConfig) -> float:
    """Linearly from 1 after the warm-up to 0 at the end."""
    span = max(1, config.max_steps - config.warmup_steps)
    return max(0.0, (config.max_steps - step) / span)


def cosine_with_min_lr(step: int, config: TrainConfig) -> float:
    """Half a cosine from 1 after the warm-up to `min_lr` at the end."""
    rate = config.min_lr_rate
    least = (config.min_lr or 0.0) / config.learning_rate if rate is None else rate
    return least + (1 - least) * cosine(step, config)


def warmup_stable_decay(step: int, config: TrainConfig) -> float:
    """1, then linearly to 0 over the last `decay_steps`."""
    return min(1.0, (config.max_steps - step) / max(1, config.decay_steps))


SCHEDULES: dict[str, Callable[[int, TrainConfig], float]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "cosine_with_min_lr": cosine_with_min_lr,
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


def clip(accelerator: Accelerator, module: nn.Module, config: TrainConfig) -> Tensor | None:
    """Limits the gradients of a module in norm and then in value, as the configuration says.

    Returns:
        The norm before; None if accelerate skips it.
    """
    norm = accelerator.clip_grad_norm_(module.parameters(), config.max_grad_norm)
    if config.max_grad_value is not None:
        clip_values(module.parameters(), config.max_grad_value)
    return norm


def clip_values(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Cuts every entry of the gradients to ± `limit`, in place.

    One by one and not as `torch.nn.utils.clip_grad_value_` does, whose kernel for many tensors does
    not know the shards of FSDP2. Gradients are not scaled any more once their norm was clipped.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.clamp_(-limit, limit)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: TrainConfig) -> None:
    """Gives each group the learning rate of a step times its own scale."""
    rate = learning_rate(step, config)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]
