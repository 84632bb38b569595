"""The choice of a repair: attempts, their scores, and the file that records them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from longrnn.diagnostics.attempts import ATTEMPTS
from longrnn.diagnostics.job import Job, Members
from longrnn.errors import UserError
from longrnn.evaluation.run import Outcome, run
from longrnn.evaluation.suites import build_evaluation
from longrnn.files import read_json, write_atomic
from longrnn.hf.opened import OpenCheckpoint
from longrnn.models.fold import unfoldable
from longrnn.reporting.tables import TableCell

UNREPAIRED, TRIED = "plain", "tried.json"
# Scores that differ by less are alike: then what folds is taken, or what is cheaper.
SCORE_MARGIN = 0.02
CHOICE_WINDOWS, KEYS_PER_DEPTH = 4, 2
DEPTHS = [0.1, 0.3, 0.5, 0.7, 0.9]
# The tokens of all prompts, relative to one: what is before a key is read once.
PROMPTS_READ = 1 + KEYS_PER_DEPTH * sum(1 - depth for depth in DEPTHS)
BITS_PER_BYTE, KEYS_RECALLED = "bits per byte", "keys recalled"


def passkeys(lengths: Sequence[int], n: int, filler: Path, seed: int) -> dict[str, Any]:
    """Return the evaluation of `n` keys at each of `DEPTHS`, in a text."""
    what = {"lengths": list(lengths), "depths": DEPTHS, "n": n, "filler": str(filler)}
    return {"kind": "passkey", "seed": seed, **what}


def cell_of(outcomes: Sequence[Outcome], model: str, at: int, column: str) -> TableCell | None:
    """Return the cell of a model at a length, in the column whose title ends with these words."""
    cells = (cell for outcome in outcomes for cell in outcome.table.cells)
    mine = (cell for cell in cells if (cell.model, cell.at) == (model, at))
    return next((cell for cell in mine if cell.metric.endswith(column) and cell.estimate), None)


class Choice:
    """Tries repairs on the texts to choose on.

    Args:
        job: what is repaired, with the documents of these texts.
        keys: prompts with a key that calibrations read; 0 to ignore keys.
        texts: the files of the documents.
        folder: gets the file TRIED and the store `choice`.

    Attributes:
        rows: by name of the attempt, `seconds`, and `members`, `folds`, `loss` (bits per byte in
            the last half), `inside` (likewise, inside the training length) and `keys` (the share
            that is recalled); or the `reason` why it was not possible.
        left_out: by name of the attempt, why it was not tried.

    Raises:
        UserError: the folder has the attempts of another repair.
    """

    def __init__(self, job: Job, keys: int, texts: Sequence[Path], folder: Path) -> None:
        self.job, self.keys, self.texts, self.folder = job, keys, texts, folder
        self.path = folder / TRIED
        self.question = {
            "model": job.model.fingerprint(),
            "texts": [document.sha256 for document in job.documents],
            "trained": job.train_length,
            "length": job.target_length,
            "keys": keys,
        }
        content = read_json(self.path) if self.path.is_file() else {"question": self.question}
        if content["question"] != self.question:
            raise UserError(f"{folder} holds another repair: choose another --output")
        self.rows: dict[str, dict[str, Any]] = content.get("rows", {})
        self.left_out: dict[str, str] = {}

    def attempt(self, name: str, seconds: float) -> None:
        """Try a repair, if its base was possible and it fits what is left of the budget."""
        attempt = ATTEMPTS[name]
        base = self.rows.get(attempt.after or UNREPAIRED, {}).get("members")
        spent = sum(row["seconds"] for row in self.rows.values())
        read = sum(self._tokens(done) for done, row in self.rows.items() if "members" in row)
        speed = read / max(spent, 1e-3)
        needed = self._tokens(name) / speed
        if base is None:
            self.left_out[name] = f"{attempt.after} has no result"
        elif name not in self.rows and spent + needed > seconds:
            minutes = math.ceil((spent + needed) / 60)
            self.left_out[name] = f"of the budget: give --budget {minutes} or more"
        else:
            tokens = (seconds - spent) * speed
            self.add(name, lambda: attempt.make(self.job, base, self.keys, tokens))

    def _tokens(self, name: str) -> float:
        """Return about how many tokens an attempt, or none, reads with its score."""
        of_score = (CHOICE_WINDOWS + bool(self.keys) * PROMPTS_READ) * self.job.target_length
        attempt = ATTEMPTS.get(name)
        return of_score + (attempt.tokens(self.job, self.keys) if attempt else 0)

    def add(self, name: str, make: Callable[[], Members]) -> None:
        """Make, score and record a mitigation, unless it is recorded already."""
        if name in self.rows:
            return
        begun = time.monotonic()
        try:
            members = make()
            row = {"members": members, **self._measured(name, members)}
        except UserError as error:
            if name == UNREPAIRED:
                raise
            row = {"reason": str(error)}
        self.rows[name] = {**row, "seconds": round(time.monotonic() - begun, 1)}
        content = {"question": self.question, "rows": self.rows}
        write_atomic(self.path, json.dumps(content, indent=1) + "\n")

    def _measured(self, name: str, members: Members) -> dict[str, float | bool]:
        job = self.job.under(members)
        trained, length = job.train_length, job.target_length
        lengths = [trained, max(trained, length // 2), length]
        texts = {"texts": [str(path) for path in self.texts], "windows": CHOICE_WINDOWS}
        specs: list[dict[str, Any]] = [{"kind": "perplexity", **texts, "lengths": lengths}]
        if self.keys:
            specs.append(passkeys([length], KEYS_PER_DEPTH, self.texts[0], seed=1))
        opened = OpenCheckpoint(name, job.model, job.tokenizer)
        evaluations = [build_evaluation(spec) for spec in specs]
        outcomes = run([opened], evaluations, self.folder / "choice", quiet=job.quiet)

        def mean(at: int, column: str) -> float:
            cell = cell_of(outcomes, name, at, column)
            return 0.0 if cell is None or cell.estimate is None else cell.estimate.mean

        return {
            "folds": not unfoldable(job.model),
            "loss": mean(length, BITS_PER_BYTE),
            "inside": mean(trained, BITS_PER_BYTE),
            "keys": mean(length, KEYS_RECALLED),
        }

    def score(self, name: str) -> float:
        """Return what is to be small: bits per byte, plus the share of keys that are lost."""
        row = self.rows[name]
        return math.inf if "reason" in row else row["loss"] - row["keys"]

    def best(self, *, folds_only: bool) -> str:
        """Return the name of the choice; `UNREPAIRED` if nothing is better."""
        possible = [
            name
            for name, row in self.rows.items()
            if not folds_only or name == UNREPAIRED or row.get("folds")
        ]
        least = min(map(self.score, possible))
        alike = [name for name in possible if self.score(name) <= least + SCORE_MARGIN]
        return next((name for name in alike if self.rows[name]["folds"]), alike[0])

    def line(self, name: str) -> str:
        """Return an attempt in words."""
        row = self.rows.get(name)
        if row is None:
            return f"{name}: left out, because {self.left_out.get(name, 'it does not fold')}"
        if "reason" in row:
            return f"{name}: not possible, because {row['reason']}"
        keys = f", {row['keys']:.0%} of the keys" if self.keys else ""
        return (
            f"{name}: {row['loss']:.3f} bits per byte in the last half{keys}, {row['inside']:.3f} "
            f"inside the training length ({row['seconds']:.0f} s)"
        )

    def lines(self) -> list[str]:
        """Return all attempts in words."""
        return [self.line(name) for name in (UNREPAIRED, *ATTEMPTS)]
