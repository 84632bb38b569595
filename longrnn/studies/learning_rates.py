"""Trains one model at every learning rate of a grid, and more seeds at the best rate.

Recurrent models learn recall only in a narrow range of learning rates, so a comparison at one rate
for all says little. Notable choices:
- A run ends at the first check at which its validation score reaches `goal`, so the number of steps
  is itself a result. A run that does not get there is recorded as not learned.
- The best rate is chosen by validation alone: fewest steps to the goal, else the lowest loss.
- Every run that is done is a row of `trials.jsonl`; the same call continues where it stopped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from longrnn.config import build_config
from longrnn.errors import DivergedError, UserError
from longrnn.results import Results
from longrnn.training import checkpoint
from longrnn.training.config import TrainConfig
from longrnn.training.train import train

logger = logging.getLogger(__name__)

# Of the training configuration: what differs between the runs of one grid.
OWN = {"output_dir", "learning_rate", "seed", "max_steps"}
OWN |= {"save_steps", "save_total_limit", "logging_steps", "report_to"}


class Goal(NamedTuple):
    """What ends a run before its last step.

    Attributes:
        score: a score of the validation, such as `token_accuracy`; None if there is no goal.
        reached: its value from which on the task counts as learned.
        every: steps between two checks.
    """

    score: str | None
    reached: float
    every: int


class Trial(NamedTuple):
    """One run.

    Attributes:
        model: name of the architecture.
        rate: learning rate.
        seed: seed of weights and data.
        steps: at which the run ended.
        learned: whether it reached the goal; None without a goal.
        loss: validation loss at the end, in nats per scored token; infinite if the run failed.
        score: the validation score at the end; None without a goal.
        failure: why the run failed; None if it did not.
    """

    model: str
    rate: float
    seed: int
    steps: int
    learned: bool | None
    loss: float
    score: float | None
    failure: str | None = None


def search(
    name: str,
    base: Mapping[str, Any],
    rates: Sequence[float],
    *,
    seeds: int,
    goal: Goal,
    folder: Path,
    quiet: bool = False,
) -> list[Trial]:
    """Train every rate with seed 0, and the best rate with all seeds; return all runs.

    Args:
        name: name of the architecture.
        base: a training configuration with `validation`; `max_steps` is the most steps of a run.
        rates: learning rates.
        seeds: seeds 0, 1, … at the best rate.
        goal: when a run ends early.
        folder: `trials.jsonl` and one folder per run, see `run_folder`.
        quiet: show no progress.

    Raises:
        UserError: no rates, no seeds, or `folder` has the runs of other settings.
    """
    if not rates or min(rates) <= 0 or seeds < 1 or goal.every < 1:
        raise UserError(
            "the grid needs learning rates above 0, and at least 1 seed and 1 step between checks: "
            "give such numbers"
        )
    config = build_config(TrainConfig, base, source=f"grid of {name}").model_dump(mode="json")
    kept = {key: value for key, value in config.items() if key not in OWN}
    header = {"evaluation": "trials", "model": name, "steps": base["max_steps"], **goal._asdict()}
    results = Results(folder / "trials.jsonl", {**header, "config": kept})

    def trial(rate: float, seed: int) -> Trial:
        for row in results.rows:
            if (row["rate"], row["seed"]) == (rate, seed):
                return _read(row)
        done = _train(name, base, rate, seed, goal, folder, quiet)
        row = done._asdict()
        results.append([row | {"loss": done.loss if math.isfinite(done.loss) else None}])
        return done

    found = [trial(rate, 0) for rate in rates]
    chosen = best(found).rate
    return found + [trial(chosen, seed) for seed in range(1, seeds)]


def best(trials: Sequence[Trial]) -> Trial:
    """Return the run that reached the goal in the fewest steps, else that of the lowest loss."""

    def order(one: Trial) -> tuple[bool, int, float]:
        return not one.learned, one.steps if one.learned else 0, one.loss

    return min(trials, key=order)


def at_best_rate(trials: Sequence[Trial]) -> list[Trial]:
    """Return the runs of all seeds at the rate that was best with seed 0."""
    rate = best([one for one in trials if one.seed == 0]).rate
    return [one for one in trials if one.rate == rate]


def run_folder(folder: Path, rate: float, seed: int) -> Path:
    """Return the output folder of a run."""
    return folder / f"rate{rate:g}-seed{seed}"


def table(trials: Sequence[Trial]) -> list[str]:
    """Return the lines of a table in Markdown: one row per architecture and learning rate."""
    lines = ["| model | learning rate | seeds | learned | steps | validation loss | score |"]
    lines.append("| --- " * 7 + "|")
    for name, rate in dict.fromkeys((one.model, one.rate) for one in trials):
        runs = [one for one in trials if (one.model, one.rate) == (name, rate)]
        chosen = rate == at_best_rate([one for one in trials if one.model == name])[0].rate
        learned = sum(bool(one.learned) for one in runs)
        cells = [
            name,
            f"**{rate:g}**" if chosen else f"{rate:g}",
            str(len(runs)),
            "–" if runs[0].learned is None else f"{learned} of {len(runs)}",
            _spread([float(one.steps) for one in runs], ",.0f"),
            _spread([one.loss for one in runs], ".3f"),
            _spread([one.score for one in runs if one.score is not None], ".2f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(values: Sequence[float], form: str) -> str:
    """Return the median with the lowest and the highest value, if they differ."""
    if not values:
        return "–"
    low, high = format(min(values), form), format(max(values), form)
    middle = format(median(values), form)
    return middle if low == high else f"{middle} ({low} to {high})"


def _train(
    name: str,
    base: Mapping[str, Any],
    rate: float,
    seed: int,
    goal: Goal,
    folder: Path,
    quiet: bool,
) -> Trial:
    """Train one run, check after check, until it reaches the goal or has all its steps."""
    most, run = int(base["max_steps"]), run_folder(folder, rate, seed)
    own = {"output_dir": str(run), "learning_rate": rate, "seed": seed}
    every = most if goal.score is None else min(goal.every, most)
    row: dict[str, Any] = {}
    done = max((checkpoint.steps(saved) for saved in checkpoint.checkpoints(run)), default=0)
    for steps in [*range(every, most, every), most]:
        if steps < done:  # an interrupted run has passed this check
            continue
        content = {**base, **own, "max_steps": steps, "eval_steps": every}
        try:
            if done:
                found = train(None, f"max_steps={steps}", resume=run, quiet=quiet)
            else:
                found = train(content, quiet=quiet)
            done = steps
        except DivergedError as error:
            # A rate that is too high ends a run; the others of the grid go on.
            logger.warning(f"{run}: {error}")
            learned = None if goal.score is None else False
            return Trial(name, rate, seed, steps, learned, math.inf, None, str(error))
        row = [one for one in found.rows if "eval_loss" in one][-1]
        if goal.score is not None and row[f"eval_{goal.score}"] >= goal.reached:
            break
    score = None if goal.score is None else row[f"eval_{goal.score}"]
    learned = None if score is None else score >= goal.reached
    return Trial(name, rate, seed, int(row["step"]), learned, row["eval_loss"], score)


def _read(row: Mapping[str, Any]) -> Trial:
    fields = {key: row[key] for key in Trial._fields}
    return Trial(**{**fields, "loss": math.inf if row["loss"] is None else row["loss"]})
