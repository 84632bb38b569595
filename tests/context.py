"""Processes that hold shares of the same rows: real ones, joined by gloo, started once per module.

A `Pool` keeps them between checks, because starting them takes longer than any check.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.inference import context as inference
from longrnn.mitigations import Mitigated
from longrnn.mixers import context
from longrnn.models import RecurrentLM
from longrnn.models.context import ContextGroup
from longrnn.state import LMState, PyTree, leaves
from tests.contracts.builders import (
    build_mitigated,
    build_model,
    differentiable,
    parameters,
    random_tree,
    real_leaves,
)

SIZE = 4
PATIENCE = timedelta(seconds=30)
Outcome = dict[str, Tensor]


class Failure(str):
    """The traceback of a process."""


class Pool:
    """`SIZE` processes, the first n of which form the context group of a check of n shares."""

    def __init__(self, folder: Path) -> None:
        # A server imports everything once, and forks.
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload([__name__, "torch._dynamo"])
        self._pipes, self._processes, self.broken = [], [], False
        for rank in range(SIZE):
            ours, theirs = server.Pipe()
            process = server.Process(
                target=_serve, args=(theirs, rank, str(folder / "rendezvous")), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, work: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        """What `work(group, *arguments)` returns in the first `size` processes, by rank.

        Raises:
            UserError: all of them raise it.
            AssertionError: another error, with its traceback.
        """
        assert not self.broken, "a process has failed before"
        for pipe in self._pipes[:size]:
            pipe.send((work, size, arguments))
        # The first answer may be an error, after which the others would wait until they give up.
        waiting, found = dict(enumerate(self._pipes[:size])), {}
        failed: list[str] = []
        while waiting:
            ready = wait(list(waiting.values()), PATIENCE.total_seconds())
            assert ready, "the processes do not answer"
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                found[rank] = waiting.pop(rank).recv()
            failed = [value for ok, value in found.values() if not ok]
            if any(isinstance(value, Failure) for value in failed):
                self.broken = True
                raise AssertionError("\n".join(failed))
        if failed:
            assert len(failed) == size, f"only {len(failed)} of {size} processes refuse"
            raise UserError(failed[0])
        return [found[rank][1] for rank in range(size)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(0 if self.broken else 20)
            process.kill()


def _serve(pipe: Any, rank: int, rendezvous: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", PATIENCE, world_size=SIZE, rank=rank)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, SIZE + 1)}
    while (wanted := pipe.recv()) is not None:
        work, size, arguments = wanted
        try:
            pipe.send((True, work(ContextGroup.of(groups[size]), *arguments)))
        except UserError as error:
            pipe.send((False, str(error)))
        except BaseException:
            pipe.send((False, Failure(traceback.format_exc())))
    os._exit(0)  # gloo sometimes aborts in its destructors


def built(description: dict[str, Any]) -> RecurrentLM | Mitigated:
    """The model of a description: the arguments of `build_model`, and `mitigations`, if any."""
    options = dict(description)
    checkpointing = options.pop("gradient_checkpointing", "no")
    specs = options.pop("mitigations", ())
    model = build_mitigated(specs, **options) if specs else build_model(**options)
    plain = model.model if isinstance(model, Mitigated) else model
    assert isinstance(plain, RecurrentLM)
    plain.gradient_checkpointing_enable(checkpointing)
    return model


def share_outcome(
    group: ContextGroup,
    description: dict[str, Any],
    tokens: Tensor,
    state: LMState,
    cuts: Sequence[Sequence[int]],
    masks: dict[str, Tensor],
) -> Outcome:
    """What one process computes of its shares: its logits, its part of every gradient, the state.

    Args:
        group: of this process.
        description: see `built`.
        tokens: `(b, t)` of all segments.
        state: before the first token.
        cuts: for each segment the borders of its shares, in tokens of `tokens`.
        masks: further arguments of the model, `(b, t)`.
    """
    model = built(description)
    start = after = differentiable(state)
    outputs = []
    for borders in cuts:
        own = slice(*borders[group.rank : group.rank + 2])
        mine = {name: mask[:, own] for name, mask in masks.items()}
        logits, after = model(tokens[:, own], after, context=group, **mine)
        outputs.append(logits)
    weights = random_tree((torch.empty(*tokens.shape, model.vocab_size).double(), after), seed=99)
    total = tokens.new_zeros((), dtype=torch.float64)
    for logits, borders in zip(outputs, cuts, strict=True):
        own = slice(*borders[group.rank : group.rank + 2])
        total = total + (logits * weights[0][:, own]).sum()
    if group.is_first:  # one process counts the state, which all of them have
        pairs = zip(leaves(after), leaves(weights[1]), strict=True)
        for (_, leaf), (_, weight) in pairs:
            if leaf.is_floating_point():
                total = total + (leaf * weight).sum()
    inputs = {**real_leaves(start, "state."), **parameters(model)}
    found = torch.autograd.grad(total, list(inputs.values()), materialize_grads=True)
    result = {f"logits {n}": logits.detach() for n, logits in enumerate(outputs)}
    result |= {f"final {name}": leaf.detach() for name, leaf in leaves(after)}
    return result | {f"gradient of {n}": g for n, g in zip(inputs, found, strict=True)}


def without_turns(group: ContextGroup, *arguments: Any) -> Outcome:
    """`share_outcome`, where it is an error if a process waits for the state of another."""
    with patch.object(context, "_in_turn", side_effect=AssertionError("a process waits")):
        return share_outcome(group, *arguments)


def whole_outcome(
    description: dict[str, Any],
    tokens: Tensor,
    state: LMState,
    cuts: Sequence[Sequence[int]],
    masks: dict[str, Tensor],
) -> Outcome:
    """What one process computes of the segments whose borders are the ends of `cuts`."""
    model = built(description)
    start = after = differentiable(state)
    outputs = []
    for borders in cuts:
        own = slice(borders[0], borders[-1])
        mine = {name: mask[:, own] for name, mask in masks.items()}
        logits, after = model(tokens[:, own], after, **mine)
        outputs.append(logits)
    whole: PyTree = (torch.cat(outputs, 1), after)
    weights = random_tree(whole, seed=99)
    pairs = zip(leaves(whole), leaves(weights), strict=True)
    terms = [(leaf * weight).sum() for (_, leaf), (_, weight) in pairs if leaf.is_floating_point()]
    inputs = {**real_leaves(start, "state."), **parameters(model)}
    found = torch.autograd.grad(
        torch.stack(terms).sum(), list(inputs.values()), materialize_grads=True
    )
    result = {f"logits {n}": logits.detach() for n, logits in enumerate(outputs)}
    result |= {f"final {name}": leaf.detach() for name, leaf in leaves(after)}
    return result | {f"gradient of {n}": g for n, g in zip(inputs, found, strict=True)}


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of all processes together: logits joined, gradients summed, one state."""
    found: Outcome = {}
    for name in outcomes[0]:
        parts = [outcome[name] for outcome in outcomes]
        if name.startswith("logits"):
            found[name] = torch.cat(parts, dim=1)
        elif name.startswith("gradient"):
            found[name] = torch.stack(parts).sum(0)
        else:
            for one, other in pairwise(parts):
                assert torch.equal(one, other), f"{name} differs between processes"
            found[name] = parts[0]
    return found


def read_together(
    group: ContextGroup, description: dict[str, Any], tokens: Tensor, width: int
) -> Outcome:
    """Logits after all tokens but the last, the state there, and the losses of all tokens.

    Args:
        group: of this process.
        description: see `built`.
        tokens: `(b, t + 1)`.
        width: most tokens per process in one call.
    """
    model = built(description)

    def read(start: int, stop: int) -> Tensor:
        return tokens[:, start:stop]

    with (
        patch.object(inference, "PREFILL_TOKENS", width),
        patch.object(inference, "scored_tokens", lambda rows, vocab_size: width),
    ):
        logits, state = inference.prefill_together(model, read, tokens.shape[1] - 1, group)
        nats = list(inference.token_losses_together(model, tokens, group))
    found = {"logits": logits, "nats": torch.cat([part for _, part in nats], 1)}
    return found | {name: leaf for name, leaf in leaves(state) if "tag" not in name}
