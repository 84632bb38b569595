"""Checks of a configuration before the run starts; nothing is written or trained."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from longrnn.errors import UserError
from longrnn.hf.tokenizer import fits
from longrnn.models.recurrent import RecurrentLM
from longrnn.tasks import SequenceTask, Task
from longrnn.training import models, sharding
from longrnn.training.config import TrainConfig
from longrnn.training.data import Source
from longrnn.training.initial_states import INITIAL_STATES, Context
from longrnn.training.mitigated import check_initial_state, under
from longrnn.training.models import Trained
from longrnn.training.optim import build_optimizer, fill, freeze, learning_rate
from longrnn.training.sources import build_task
from longrnn.training.validation import Validation


def check_one_process(config: TrainConfig) -> None:
    """Refuses `num_processes` above 1, where each run has one process.

    Raises:
        UserError: it is above 1.
    """
    if (value := config.num_processes) not in (None, 1):
        raise UserError(f"each run has one process here: leave out num_processes={value}")


def check(config: TrainConfig, *, quiet: bool = True) -> None:
    """Raises what a `Trainer` would raise for a configuration, in this one process.

    The number of processes is that of the configuration, or the one that a launch asks for.

    Args:
        config: the run.
        quiet: print no progress where data is tokenized.

    Raises:
        UserError: the configuration is invalid, or its data does not fit.
    """
    groups = _groups(config)
    config = replace(config)  # which building a model fills in
    config.tokenizer, tokenizer = models.tokenizer_of(config)
    task = build_task(config.task, tokenizer, name=config.tokenizer, quiet=quiet)
    source = Source(task, config, 0, groups)
    with torch.random.fork_rng(devices=[]):
        if config.model is not None and config.init_from is None and not config.transformer:
            check_vocabulary(config.model.vocab_size, config, task)
            with torch.device("meta"):  # nothing here reads its weights
                model = RecurrentLM(replace(config.model, vocab_size=1))
        else:
            model = models.build(config)
            check_model(model, config, task)
    model = under(model, config.mitigation)
    context = Context(model.init_state, config.seed, 0, 1, lambda part: part)
    INITIAL_STATES.build(config.initial_state, context)
    check_initial_state(model, config.initial_state["kind"])
    learning_rate(0, config)
    fill(model, config.fill)
    freeze(model, config.freeze)
    build_optimizer(model, config)
    if config.validation:
        held_out = build_task(config.validation, tokenizer, name=config.tokenizer, quiet=quiet)
        validation = Validation(config, model, task, held_out, 0, 1)
        if model.vocab_size > 1:
            check_vocabulary(model.vocab_size, config, validation.task)
        elif config.model is not None:
            check_vocabulary(config.model.vocab_size, config, validation.task)
    source.check()
    check_positions(model, source)


def _groups(config: TrainConfig) -> int:
    """The number of processes that read different rows; 1 where no number is given.

    Raises:
        UserError: groups of processes that do not divide the number, or two different numbers.
    """
    given, launched = config.num_processes, int(os.environ.get("WORLD_SIZE", "1"))
    if given is None and launched == 1:
        return 1
    processes = given or launched
    if launched not in (1, processes):
        raise UserError(
            f"num_processes={given} and the launch starts {launched} processes: leave out one of "
            "the two numbers, or make them equal"
        )
    size = config.shard_size
    if size is not None and processes % size:
        raise UserError(
            f"shard_size={size} does not divide the {processes} processes of the run: set a "
            "multiple of it"
        )
    return processes


def check_vocabulary(vocab_size: int, config: TrainConfig, task: Task) -> None:
    """Checks that the model has the ids of the task, and not many more than the tokenizer.

    Raises:
        UserError: it does not.
    """
    ids = task.vocab_size
    reads_text = not isinstance(task, SequenceTask)
    if vocab_size >= ids and (not reads_text or fits(ids, vocab_size)):
        return
    if config.init_from is not None and reads_text:
        raise UserError(
            f"the tokenizer {config.tokenizer} has {ids:,} ids and the model of init_from="
            f"{config.init_from} {vocab_size:,}: leave out tokenizer for the one beside the "
            "checkpoint, or give the one that this model was trained with"
        )
    key = "transformer.vocab_size" if config.transformer else "model.vocab_size"
    remedy = f"start from a model with at least {ids}" if config.init_from else f"set {key}={ids}"
    raise UserError(f"the task uses {ids} token ids and the model has {vocab_size}: {remedy}")


def check_model(model: Trained, config: TrainConfig, task: Task) -> None:
    """Checks that a model fits the task, and a transformer the initial state and launch.

    Raises:
        UserError: it does not.
    """
    check_vocabulary(model.vocab_size, config, task)
    if isinstance(model, RecurrentLM):
        return
    if config.initial_state["kind"] != "zero":
        raise UserError(
            "transformers computes this model in training, always from the zero state: set "
            "initial_state={kind: zero}"
        )
    if task.packing:
        raise UserError(
            "a transformer attends to all documents of a row, which share no state here: set "
            "task.packing=false"
        )
    if sharding.is_requested():
        raise UserError("a transformer is not sharded here: launch without FSDP")


def check_positions(model: Trained, source: Source) -> None:
    """Checks that the positions of a model suffice for the rows or documents of the run.

    Raises:
        UserError: they do not.
    """
    needed = source.longest()
    if isinstance(model, RecurrentLM):
        there, key = model.position.n_positions, "model.position.max_length"
        remedy = ", lower length.max, or use model.position={kind: sinusoidal}"
    else:
        there, key = model.max_length, "transformer.max_position_embeddings"
        remedy = ", or lower length.max"
    if there is not None and there < needed:
        raise UserError(
            f"the model has {there} positions and this run may reach {needed}: set "
            f"{key}={needed}{remedy}"
        )
