"""The optimizer (AdamW) and its learning rate, which is a function of the step without a state."""

import math
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from longrnn.errors import UserError, nearest
from longrnn.training.config import TrainConfig

# Never decayed, however many axes they have: what sets time scales, what scales, what shifts.
UNDECAYED = ("*A_log", "*dt_bias", "*.D", "*norm.weight", "*bias*", "learned.*")


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, kernels, embeddings and tables of positions."""
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


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a model, in groups of one weight decay and learning rate each.

    Parameters whose factor is 0 are frozen. A group's `scale` is the factor of its learning rate,
    see `set_learning_rate`.

    Args:
        model: with whole or sharded parameters.
        config: the run.

    Raises:
        UserError: a pattern matches nothing, or nothing is left to train.
    """
    scales: dict[nn.Parameter, float] = {}
    for pattern, factor in config.learning_rate_scale.items():
        scales |= dict.fromkeys(_matching(model, pattern, "learning_rate_scale"), factor)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and scales.get(parameter) != 0)
        if parameter.requires_grad:
            decay = config.weight_decay if decays(name, parameter) else 0.0
            groups.setdefault((decay, scales.get(parameter, 1.0)), []).append(parameter)
    if not groups:
        raise UserError("learning_rate_scale freezes all parameters: set fewer of them to 0")
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": decay, "scale": scale}
            for (decay, scale), parameters in groups.items()
        ],
        lr=config.learning_rate,
        betas=(0.9, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def _matching(model: nn.Module, pattern: str, key: str) -> list[nn.Parameter]:
    """The parameters whose name `pattern` matches; a tied head is found by both of its names.

    Raises:
        UserError: there is none.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    matching = [parameter for name, parameter in named.items() if fnmatchcase(name, pattern)]
    if not matching:
        # Names as patterns, so that a deep model does not list each of its layers.
        known = {re.sub(r"\.\d+\.", ".*.", name) for name in named}
        known |= {f"*.{name.rpartition('.')[2]}" for name in named}
        raise UserError(f"{key}: no parameter matches {pattern!r}: {nearest(pattern, known)}")
    return matching


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of step `step`, counted from 0."""
    warmup = config.warmup_steps or 0
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    start = warmup if config.decay_steps is None else config.max_steps - config.decay_steps
    done = min(max((step - start) / max(1, config.max_steps - start), 0.0), 1.0)
    shape = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
    }[config.lr_scheduler_type]
    return config.learning_rate * (config.min_lr_rate + (1 - config.min_lr_rate) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: TrainConfig) -> None:
    """Gives each group the learning rate of a step times its own scale."""
    rate = learning_rate(step, config)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]
