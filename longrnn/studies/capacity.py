"""Computes forgetting and recall capacity by state size from recorded evaluations.

Two lengths for every state size and seed (arXiv 2410.07145):

- T_forget, the smallest training length from which on all models that were tried forget robustly:
  on long prompts the loss by position never exceeds 2 × the largest inside the training length
  (`longrnn.evaluation.forgetting`). A model that passes while one with a greater training length
  fails does not count.
- T_recall, the longest context with a passkey accuracy above 95 %, of the best model of the size.

Models of one seed are a family, and every family has a length for each of its state sizes: the
scatter between seeds is what the intervals of a fit are made of.

Notable choices:
- The size of a state is the number of its entries in `longrnn diagnose states`: the matrices of
  Mamba-2 and the vectors c of an LSTM and h of a GRU or RNN, over all layers, without convolution
  inputs.
- A length at the end of the range that was tried is a bound (T_forget ≤ the shortest training
  length; T_recall ≥ the longest prompt) and is not used in fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from longrnn.errors import UserError
from longrnn.evaluation.forgetting import forgetting
from longrnn.evaluation.passkey import by_model
from longrnn.results import Row, read_results

RECALLED = 0.95
# State sizes that a fit needs.
LEAST_SIZES = 3


class Recorded(NamedTuple):
    """Rows of evaluations by the fingerprint of the model."""

    perplexity: dict[str, list[Row]]
    passkey: dict[str, list[Row]]


class Member(NamedTuple):
    """One model of the family, with its recorded results.

    Attributes:
        name: name of the checkpoint.
        fingerprint: fingerprint of the model.
        state_size: number of entries in its state.
        train_length: in tokens.
        seed: of the training.
        robust: whether it forgets robustly; None if no loss beyond the training length is recorded.
        beyond: its largest loss beyond the training length relative to its largest inside.
        recalled: the longest prompt with an accuracy above RECALLED; 0 for none, None for unknown.
        asked: the longest prompt that was evaluated.
    """

    name: str
    fingerprint: str
    state_size: int
    train_length: int
    seed: int
    robust: bool | None
    beyond: float | None
    recalled: int | None
    asked: int | None


class Bounded(NamedTuple):
    """A length or a bound on it: `bound` is "", "≤", "≥" or ">"."""

    value: int
    bound: str

    def __str__(self) -> str:
        return f"{self.bound} {self.value:,}".strip()


class Size(NamedTuple):
    """Both lengths for a state size and seed; None if there are no results."""

    state_size: int
    seed: int
    forget: Bounded | None
    recall: Bounded | None


def read_recorded(paths: Sequence[Path]) -> Recorded:
    """Read the rows of all passkey and perplexity evaluations in files and folders.

    Raises:
        UserError: there are none, or a file is not a results file.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir() and not path.is_file():
            raise UserError(f"no results at {path}: give files or folders of recorded evaluations")
        files += sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    found = Recorded({}, {})
    for file in files:
        header, rows = read_results(file)
        if header.get("evaluation") == "perplexity":
            found.perplexity.setdefault(header["model"], []).extend(rows)
        if header.get("evaluation") == "passkey" and "chunk_select" not in header:
            split = by_model(rows)
            for name, fingerprint in header["models"].items():
                found.passkey.setdefault(fingerprint, []).extend(split.get(name, []))
    if not found.perplexity and not found.passkey:
        raise UserError(
            f"{', '.join(map(str, paths))} holds no passkey or perplexity evaluation: "
            "run longrnn eval first, or give its folder"
        )
    return found


def member(
    name: str, fingerprint: str, state_size: int, train_length: int, seed: int, recorded: Recorded
) -> Member:
    """Return one model with its recorded results.

    Raises:
        UserError: there are none.
    """
    losses = recorded.perplexity.get(fingerprint, [])
    answers = recorded.passkey.get(fingerprint, [])
    if not losses and not answers:
        raise UserError(
            f"no recorded evaluation of {name} (fingerprint {fingerprint}): run longrnn "
            "eval perplexity and longrnn eval passkey on it, or leave it out"
        )
    longest = max((row["length"] for row in losses), default=0)
    judged = None
    if losses:
        judged = forgetting([row for row in losses if row["length"] == longest], train_length)
    return Member(
        name,
        fingerprint,
        state_size,
        train_length,
        seed,
        None if judged is None else judged.robust,
        None if judged is None else judged.beyond / judged.inside,
        _recalled(answers) if answers else None,
        max((row["length"] for row in answers), default=None),
    )


def _recalled(answers: Sequence[Row]) -> int:
    """Return the longest prompt with an accuracy above RECALLED, over all positions of the key."""
    right: dict[int, list[bool]] = {}
    for row in answers:
        right.setdefault(row["length"], []).append(row["correct"])
    return max((n for n, all_ in right.items() if sum(all_) > RECALLED * len(all_)), default=0)


def sizes(members: Sequence[Member]) -> list[Size]:
    """Return T_forget and T_recall by state size and seed, ascending.

    Raises:
        UserError: there are fewer than three sizes, too few for a fit.
    """
    families: dict[tuple[int, int], list[Member]] = {}
    for one in sorted(members, key=lambda one: (one.state_size, one.seed, one.train_length)):
        families.setdefault((one.state_size, one.seed), []).append(one)
    different = {size for size, _ in families}
    if len(different) < LEAST_SIZES:
        raise UserError(
            f"these models have {len(different)} different state sizes and a fit needs "
            f"{LEAST_SIZES}: give a family such as that of scripts/study_capacity.py"
        )
    return [Size(*key, _forget(family), _recall(family)) for key, family in families.items()]


def _forget(family: Sequence[Member]) -> Bounded | None:
    judged = [one.train_length for one in family if one.robust is not None]
    failing = [one.train_length for one in family if one.robust is False]
    if not judged:
        return None
    enough = [length for length in judged if length > max(failing, default=0)]
    if not enough:
        return Bounded(max(judged), ">")
    return Bounded(min(enough), "" if failing else "≤")


def _recall(family: Sequence[Member]) -> Bounded | None:
    asked = [one for one in family if one.recalled is not None and one.asked is not None]
    if not asked:
        return None
    best = max(asked, key=lambda one: one.recalled or 0)
    if not best.recalled:
        return None
    return Bounded(best.recalled, "≥" if best.recalled == best.asked else "")
