"""The choice of a repair: its attempts with their scores, and the file that has them."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, FiniteFloat

from longrnn.cells.observe import watch
from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.diagnostics.attempts import ATTEMPTS
from longrnn.diagnostics.job import Job, Members
from longrnn.errors import UserError
from longrnn.evaluation.run import build_evaluation, run
from longrnn.files import read_json, write_atomic
from longrnn.intervals import Estimate
from longrnn.mitigations.spec import with_files
from longrnn.models.fold import unfoldable
from longrnn.options import Options, validated
from longrnn.progress import OutOfTimeError, check_time, time_limit
from longrnn.reporting.tables import ResultTable

UNREPAIRED, TRIED = "unrepaired", "tried.json"
# Scores that differ by less are alike: then what folds is taken, or what is cheaper.
SCORE_MARGIN = 0.02
CHOICE_WINDOWS, KEYS_PER_DEPTH = 4, 2
DEPTHS = [0.1, 0.3, 0.5, 0.7, 0.9]
# The tokens of all prompts, relative to one: what is before a key is read once.
PROMPTS_READ = 1 + KEYS_PER_DEPTH * sum(1 - depth for depth in DEPTHS)
# An attempt is stopped after this share of the time that is left, or this many times its estimate,
# whichever is longer: in some cells a limit is computed token by token.
TIME_SHARE, OVERTIME = 1 / 3, 3


def passkeys(lengths: Sequence[int], n: int, filler: Path, seed: int) -> dict[str, Any]:
    """Return the evaluation of `n` keys at each of `DEPTHS`, in a text."""
    what = {"lengths": list(lengths), "depths": DEPTHS, "n": n, "filler": str(filler)}
    return {"kind": "passkey", "seed": seed, **what}


class Row(Options, strict=True):
    """What an attempt reached, or `why` it has no result.

    Attributes:
        seconds: that it took.
        members: of which `mitigation` makes the whole mitigation; None without a result.
        folds: whether weights can express it.
        loss: bits per byte, see `Job.end`.
        inside: likewise, inside the training length.
        keys: the share of keys recalled.
        why: in words.
        budget: in seconds; a larger one decides anew. None if no budget would help.
    """

    seconds: FiniteFloat = 0.0
    members: Members | None = None
    folds: bool = False
    loss: FiniteFloat = 0.0
    inside: FiniteFloat = 0.0
    keys: FiniteFloat = 0.0
    why: str = ""
    budget: FiniteFloat | None = None


class Tried(Options, strict=True):
    """The content of the file TRIED: what is repaired, and the rows by name of the attempt."""

    question: dict[str, Any]
    rows: dict[str, Row] = Field({})


def scores(
    job: Job, tables: Sequence[ResultTable], model: int = 0, field: str = "estimate"
) -> dict[str, Estimate]:
    """Return a model's `loss` and `keys` at the length, and its loss `inside`, if measured.

    Args:
        job: has the lengths.
        tables: of perplexity and passkeys.
        model: its index.
        field: of the cells; `difference` for differences from the first model.
    """
    lengths = {
        "perplexity": {job.train_length: "inside", job.target_length: "loss"},
        "passkey": {job.target_length: "keys"},
    }
    found, name_of_model = {}, tables[0].models[model]
    for table in tables:
        evaluation: Any = table.evaluation
        names = lengths.get(evaluation.kind, {})
        for cell in table.cells if names else ():
            value: Estimate | None = getattr(cell, field)
            is_score = cell.column == evaluation.column and cell.model == name_of_model
            if is_score and cell.at in names and value is not None:
                found[names[cell.at]] = value
    return found


class Choice:
    """Tries repairs on the texts to choose on.

    Args:
        job: what is repaired, with the documents of these texts.
        keys: prompts with a key that calibrations read; 0 to ignore keys.
        texts: the files of the documents.
        folder: gets the file TRIED and the store `choice`.

    Attributes:
        rows: of the finished attempts, by name.

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
        tried: Tried = validated(Tried, content, str(self.path))
        plain = tried.rows.get(UNREPAIRED, Row(members=[]))
        if tried.question != self.question or plain.members != []:
            raise UserError(f"{folder} holds another repair: choose another --output")

        def here(file: str) -> str:  # the folder may have been moved
            return str(folder / Path(file).name)

        self.rows = tried.rows
        for row in self.rows.values():
            row.members = row.members and [with_files(member, here) for member in row.members]

    def attempt(self, name: str, seconds: float) -> None:
        """Try a repair, if its base was possible and it fits what is left of the budget."""
        known, attempt = self.rows.get(name), ATTEMPTS[name]
        if known is not None and (known.budget is None or seconds <= known.budget):
            return
        base = self.rows.get(attempt.base or UNREPAIRED, Row()).members
        left = seconds - sum(row.seconds for row in self.rows.values())
        speed = self._tokens(UNREPAIRED) / max(self.rows[UNREPAIRED].seconds, 1e-3)
        needed = self._tokens(name) / speed
        if base is None:
            why = f"left out, because {attempt.base} has no result"
            self._record(name, Row(why=why, budget=seconds))
        elif left < needed:
            minutes = math.ceil((seconds - left + needed) / 60)
            why = f"left out, because of the budget: give --budget {minutes} or more"
            self._record(name, Row(why=why, budget=seconds))
        else:
            allowed = min(left, max(TIME_SHARE * left, OVERTIME * needed))
            try:
                with time_limit(allowed), watch(self.job.model.cells, lambda *_: check_time()):
                    self.add(name, lambda: attempt.make(self.job, base, self.keys, left * speed))
            except OutOfTimeError:
                why = (
                    f"left out, because of the budget: it was stopped after {allowed:.0f} s; give "
                    f"--budget {math.ceil(seconds / 30)}"
                )
                self._record(name, Row(seconds=round(allowed, 1), why=why, budget=seconds))

    def _tokens(self, name: str) -> float:
        """Return about how many tokens an attempt, or none, reads with its score."""
        of_score = (CHOICE_WINDOWS + bool(self.keys) * PROMPTS_READ) * self.job.target_length
        attempt = ATTEMPTS.get(name)
        return of_score + (attempt.tokens(self.job, self.keys) if attempt else 0)

    def add(self, name: str, make: Callable[[], Members]) -> None:
        """Make, score and record a mitigation."""
        begun = time.monotonic()
        try:
            row = self._measured(name, make())
        except UserError as error:
            if name == UNREPAIRED or isinstance(error, OutOfTimeError):
                raise
            row = Row(why=f"not possible, because {error}")
        row.seconds = round(time.monotonic() - begun, 1)
        self._record(name, row)

    def _record(self, name: str, row: Row) -> None:
        self.rows[name] = row
        tried = Tried(question=self.question, rows=self.rows)
        write_atomic(self.path, tried.model_dump_json(indent=1, exclude_defaults=True) + "\n")

    def _measured(self, name: str, members: Members) -> Row:
        job = self.job.under(members)
        trained, length = job.train_length, job.target_length
        lengths = [trained, max(trained, length // 2), length]
        texts = {"texts": [str(path) for path in self.texts], "windows": CHOICE_WINDOWS}
        specs: list[dict[str, Any]] = [{"kind": "perplexity", **texts, "lengths": lengths}]
        if self.keys:
            specs.append(passkeys([length], KEYS_PER_DEPTH, self.texts[0], seed=1))
        opened = OpenCheckpoint(name, job.model, job.tokenizer)
        evaluations = [build_evaluation(spec) for spec in specs]
        tables = run([opened], evaluations, self.folder / "choice", quiet=job.quiet)
        means: dict[str, Any] = {k: value.mean for k, value in scores(job, tables).items()}
        return Row(members=members, folds=not unfoldable(job.model), **means)

    def score(self, name: str) -> float:
        """Return what is to be small: bits per byte, plus the share of keys that are lost."""
        row = self.rows[name]
        return math.inf if row.members is None else row.loss - row.keys

    def best(self, *, folds_only: bool) -> str:
        """Return the name of the choice; `UNREPAIRED` if nothing is better."""
        possible = [
            name
            for name, row in self.rows.items()
            if not folds_only or name == UNREPAIRED or row.folds
        ]
        least = min(map(self.score, possible))
        alike = [name for name in possible if self.score(name) <= least + SCORE_MARGIN]
        return next((name for name in alike if self.rows[name].folds), alike[0])

    def line(self, name: str) -> str:
        """Return an attempt in words."""
        row = self.rows.get(name, Row(why="left out, because it does not fold"))
        if row.members is None:
            return f"{name}: {row.why}"
        keys = f", {row.keys:.0%} of the keys" if self.keys else ""
        return (
            f"{name}: {row.loss:.3f} bits per byte in {self.job.end}{keys}, "
            f"{row.inside:.3f} inside the training length ({row.seconds:.0f} s)"
        )

    def is_whole(self) -> bool:
        """Return whether the model loses neither loss nor keys beyond its training length."""
        row = self.rows[UNREPAIRED]
        return row.loss <= row.inside and (not self.keys or row.keys == 1)

    def lines(self) -> list[str]:
        """Return all attempts in words."""
        return [self.line(name) for name in (UNREPAIRED, *ATTEMPTS)]
