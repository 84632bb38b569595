"""`longrnn.repair`: what is wrong with a model at a length, and the best repair within a budget.

Notable choices:
- The texts are divided: calibrations and the choice read one part, and the proof another one, which
  is read once, at the end. Keys of the proof are not those of the choice.
- The choice is the attempt with the least score: bits per byte in the last half of the length, plus
  the share of keys that it loses. One that folds into weights is taken unless another is better by
  more than `MARGIN`.
- Every attempt is recorded when it is finished, with its mappings, score and seconds. The same
  command continues from there; results of evaluations are in stores.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longrnn.diagnostics.attempts import ATTEMPTS, Attempt, Setting
from longrnn.diagnostics.states import diagnose
from longrnn.errors import UserError
from longrnn.evaluation.run import Outcome, run, run_and_report
from longrnn.evaluation.suites import build_evaluation
from longrnn.evaluation.texts import read_documents
from longrnn.files import read_json, read_text, write_atomic
from longrnn.hf.convert import OURS, layout_of, write_checkpoint
from longrnn.hf.load import load_editable
from longrnn.hf.names import CheckpointName, required_training_length
from longrnn.hf.opened import OpenCheckpoint
from longrnn.hf.tokenizer import load_tokenizer
from longrnn.intervals import Estimate
from longrnn.locks import hold
from longrnn.mitigations import mitigation
from longrnn.mitigations.base import Calibration
from longrnn.mitigations.spec import write_calibration
from longrnn.models import RecurrentLM
from longrnn.models.fold import fold
from longrnn.reporting.states import summary
from longrnn.reporting.tables import TableCell
from longrnn.units import format_length

# Scores that differ by less are alike: then what folds is taken, or what is cheaper.
MARGIN = 0.02
PLAIN, REPAIRED = "plain", "repaired"
# Keyed prompts that calibrations read, and windows and prompts of the choice and of the proof.
CALIBRATED_KEYS, CHOICE_WINDOWS, PROOF_WINDOWS, CHOICE_KEYS, PROOF_KEYS = 3, 2, 8, 2, 4
DEPTHS = [0.1, 0.3, 0.5, 0.7, 0.9]
TRIED = "tried.json"


class Repair(NamedTuple):
    """The result of a repair.

    Attributes:
        sentences: what is wrong, and what the repair reached.
        choice: name of the attempt; None if nothing helped.
        checkpoint: the folder that was written; None if nothing helped, or for a hybrid whose
            repair does not fold.
        mitigation: the file; None if nothing helped.
        report: the page with the proof.
    """

    sentences: list[str]
    choice: str | None
    checkpoint: Path | None
    mitigation: Path | None
    report: Path


def repair(
    checkpoint: str,
    texts: Sequence[str | Path] | str | Path,
    output: str | Path,
    *,
    length: int = 65536,
    train_length: int | None = None,
    budget: float = 30.0,
    folds_only: bool = False,
    keys: bool = False,
    device: str | None = None,
    quiet: bool = True,
) -> Repair:
    """Diagnose a model, try repairs, and write the best one with its proof.

    Args:
        checkpoint: as `load` takes it, without a mitigation.
        texts: text files. The last one proves; of a single one, the second half does.
        output: a folder, which is resumed.
        length: tokens up to which the model should work.
        train_length: tokens that it was trained on; None for those of its train.yaml.
        budget: minutes for attempts. One is left out if it would not fit, by the speed measured.
        folds_only: try only what folds into weights, which other programs run.
        keys: choose and prove by passkeys in the texts too.
        device: of the model; None for the CPU.
        quiet: show no progress.

    Raises:
        UserError: the texts are too short, the model cannot be repaired, or the folder holds
            another repair.
    """
    folder = Path(output)
    hold(folder, instead="choose another --output")
    trained = train_length or required_training_length(checkpoint)
    model, tokenizer = load_editable(checkpoint, device=device), load_tokenizer(checkpoint)
    plain = OpenCheckpoint(
        PLAIN, model, tokenizer, CheckpointName.parse(checkpoint), device or "cpu"
    )
    paths = [texts] if isinstance(texts, str | Path) else texts
    choose, prove = divide([Path(path) for path in paths], folder)
    documents = read_documents(choose, tokenizer, model)
    how = {"length": length, "trained": trained, "keys": keys, "folds_only": folds_only}
    hashes = [document.sha256 for document in documents]
    tried = Tried(folder / TRIED, {"model": model.fingerprint(), "texts": hashes, **how})
    setting = Setting(model, tokenizer, documents, trained, length, CALIBRATED_KEYS * keys, quiet)
    seen = diagnose(model, documents[:1], length, train_length=trained, quiet=quiet)
    sentences = [summary(seen)]
    judge = Judge(setting, choose, folder / "choice")
    tried.add(PLAIN, list, judge)
    sentences.append(
        f"In the last half of {format_length(length)} tokens it has "
        f"{tried.rows[PLAIN]['loss']:.2f} bits per byte, and "
        f"{tried.rows[PLAIN]['inside']:.2f} inside its training length of {format_length(trained)}"
        + (f"; it recalls {tried.rows[PLAIN]['keys']:.0%} of the keys there." if keys else ".")
    )
    tried.say(sentences[0], sentences[1], quiet=quiet)
    for name, attempt in ATTEMPTS.items():
        if folds_only and not attempt.folds:
            continue
        _attempt(name, attempt, setting, tried, judge, 60 * budget)
        tried.say(tried.line(name), quiet=quiet)
    choice = tried.best()
    members = tried.rows[choice]["members"]
    repaired = plain._replace(
        name=REPAIRED, model=model.under([mitigation(member) for member in members])
    )
    if choice != PLAIN and isinstance(model, RecurrentLM):
        repaired = repaired._replace(model=copy.deepcopy(repaired.model))
        rest = fold(repaired.model)
        repaired = repaired._replace(model=repaired.model.under(None).under(rest))
    models = [plain, repaired] if choice != PLAIN else [plain]
    evaluations = [build_evaluation(spec) for spec in proof(setting, prove)]
    outcomes, (_, report, *_) = run_and_report(
        models, evaluations, folder, quiet=quiet, notes=[*sentences, *map(tried.line, tried.rows)]
    )
    result = Repair(sentences, None, None, None, report)
    if choice == PLAIN or not helps(outcomes, length):
        sentences.append(
            "No repair within the budget helps on text that the choice did not see: train the "
            "model with carried states (`longrnn train initial_state=carry`)."
        )
        return result
    sentences.append(quote(checkpoint, choice, outcomes, setting, prove))
    path = folder / "mitigation.yaml"
    known = Calibration(str(path), model.fingerprint(), trained, tuple(hashes))
    write_calibration(path, members, known)
    return result._replace(
        choice=choice,
        mitigation=path,
        checkpoint=_written(checkpoint, model, members, folder / "checkpoint"),
    )


def divide(texts: Sequence[Path], folder: Path) -> tuple[list[Path], Path]:
    """Return the texts to choose on and the one that proves; halves of a single one are written."""
    if len(texts) > 1:
        return list(texts[:-1]), texts[-1]
    text, _ = read_text(texts[0])
    middle = text.find("\n", len(text) // 2) + 1 or len(text) // 2
    halves = folder / f"{texts[0].stem}_choose.txt", folder / f"{texts[0].stem}_prove.txt"
    for path, part in zip(halves, (text[:middle], text[middle:]), strict=True):
        write_atomic(path, part)
    return [halves[0]], halves[1]


class Judge(NamedTuple):
    """Scores mitigations on the texts to choose on.

    Attributes:
        setting: what is repaired.
        texts: the files.
        folder: the store of the results.
    """

    setting: Setting
    texts: Sequence[Path]
    folder: Path

    def score(self, name: str, members: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Return the loss in the last half and inside, in bits per byte, and the share of keys."""
        setting, length = self.setting, self.setting.length
        model = setting.model.under([mitigation(member) for member in members])
        what = {"texts": [str(path) for path in self.texts], "windows": CHOICE_WINDOWS}
        lengths = [setting.trained, max(setting.trained, length // 2), length]
        specs: list[dict[str, Any]] = [{"kind": "perplexity", **what, "lengths": lengths}]
        if setting.keys:
            filler = str(self.texts[0])
            specs.append(_passkey([length], CHOICE_KEYS, filler, seed=1))
        opened = OpenCheckpoint(name, model, setting.tokenizer)
        built = [build_evaluation(spec) for spec in specs]
        outcomes = run([opened], built, self.folder, quiet=setting.quiet)
        found = {"loss": _loss(outcomes, name, length), "inside": _loss(outcomes, name, lengths[0])}
        shares = _keys(outcomes, name, length)
        return {k: e.mean for k, e in found.items() if e} | {"keys": shares.mean if shares else 0.0}


class Tried:
    """The record of attempts, which is written after each of them.

    Args:
        path: of the file.
        question: what is repaired; the file of another repair is refused.

    Attributes:
        rows: by name, `members`, `seconds`, and `loss`, `inside` and `keys`; or a `reason`.
    """

    def __init__(self, path: Path, question: dict[str, Any]) -> None:
        self.path, self.question = path, question
        content = read_json(path) if path.is_file() else {"question": question, "rows": {}}
        if content.get("question") != question:
            raise UserError(f"{path.parent} holds another repair: choose another --output")
        self.rows: dict[str, dict[str, Any]] = content["rows"]

    def add(self, name: str, make: Any, judge: Judge) -> None:
        """Make and score an attempt that is not recorded yet."""
        if name in self.rows:
            return
        begun = time.monotonic()
        try:
            members = make()
            row = {"members": members, **judge.score(name, members)}
        except UserError as error:
            if name == PLAIN:
                raise
            row = {"reason": str(error)}
        self.rows[name] = {**row, "seconds": round(time.monotonic() - begun, 1)}
        text = json.dumps({"question": self.question, "rows": self.rows}, indent=1)
        write_atomic(self.path, text + "\n")

    def seconds(self) -> float:
        """Return the seconds that all attempts took."""
        return sum(row["seconds"] for row in self.rows.values())

    def score(self, name: str) -> float:
        """Return what is to be small: bits per byte, plus the share of keys that are lost."""
        row = self.rows.get(name, {})
        loss = row.get("loss", float("nan"))
        return loss - row["keys"] if loss == loss else float("inf")

    def best(self) -> str:
        """Return the name of the choice, `PLAIN` if nothing is better."""
        least = min(map(self.score, self.rows))
        alike = [name for name in self.rows if self.score(name) <= least + MARGIN]
        folding = [name for name in alike if name == PLAIN or ATTEMPTS[name].folds]
        return (folding or alike)[0]

    def line(self, name: str) -> str:
        """Return an attempt in words."""
        row = self.rows.get(name)
        if row is None:
            return f"{name}: left out, it does not fit the budget"
        if "reason" in row:
            return f"{name}: {row['reason']}"
        keys = f", keys {row['keys']:.0%}" if self.question["keys"] else ""
        return (
            f"{name}: {row['loss']:.3f} bits per byte beyond, {row['inside']:.3f} inside{keys} "
            f"({row['seconds']:.0f} s)"
        )

    def say(self, *lines: str, quiet: bool) -> None:
        """Print lines, unless quiet."""
        if not quiet:
            print("\n".join(lines), flush=True)


def _attempt(
    name: str, attempt: Attempt, setting: Setting, tried: Tried, judge: Judge, seconds: float
) -> None:
    """Try one thing, if it fits what is left of the budget and can be made."""
    before = tried.rows.get(attempt.after or PLAIN, {}).get("members")
    left = seconds - tried.seconds()
    read = CHOICE_WINDOWS * setting.length
    speed = read / max(tried.rows[PLAIN]["seconds"], 1e-3)
    if before is None or attempt.tokens(setting) + read > left * speed:
        return
    tried.add(name, lambda: attempt.make(setting, before, left * speed), judge)


def _passkey(lengths: Sequence[int], n: int, filler: str, seed: int) -> dict[str, Any]:
    what = {"lengths": list(lengths), "depths": DEPTHS, "n": n, "filler": filler, "seed": seed}
    return {"kind": "passkey", **what}


def proof(setting: Setting, prove: Path) -> list[dict[str, Any]]:
    """Return the evaluations that compare the repaired model with the plain one."""
    length, trained = setting.length, setting.trained
    lengths = sorted(
        {trained, *(length // part for part in (16, 4, 2, 1) if length > trained * part)}
    )
    specs: list[dict[str, Any]] = [
        {
            "kind": "perplexity",
            "texts": [str(prove)],
            "lengths": lengths,
            "windows": PROOF_WINDOWS,
        }
    ]
    if setting.keys:
        at = [length // part for part in (16, 4, 1) if length // part >= 512]
        specs.append(_passkey(at, PROOF_KEYS, str(prove), seed=0))
    return [*specs, {"kind": "cost", "lengths": [min(length, 4096)]}]


def helps(outcomes: Sequence[Outcome], length: int) -> bool:
    """Return whether the loss or the keys at the length are better, by their intervals."""
    loss, keys = (_cell(outcomes, REPAIRED, length, word) for word in ("by position", "recalled"))
    if keys is not None and keys.difference is not None and keys.difference.low > 0:
        return True
    if loss is None or loss.difference is None:
        return False
    change = loss.difference
    return change.high < 0 if change.n > 1 else change.mean < 0


def quote(
    checkpoint: str, choice: str, outcomes: Sequence[Outcome], setting: Setting, prove: Path
) -> str:
    """Return the result in a sentence, with intervals."""
    length, name = setting.length, format_length(setting.length)
    losses = {model: _loss(outcomes, model, length) for model in (PLAIN, REPAIRED)}
    before, after = losses[PLAIN], losses[REPAIRED]
    inside = _loss(outcomes, REPAIRED, setting.trained)
    assert before is not None
    assert after is not None
    assert inside is not None
    sentence = (
        f"{checkpoint}, trained on {format_length(setting.trained)} tokens, has "
        f"{after.show()} bits per byte in the last half of {name} tokens of {prove.name} after the "
        f"repair by {choice}, instead of {before.show()} (n = {after.n}), and {inside.show()} "
        "inside its training length"
    )
    if keys := _keys(outcomes, REPAIRED, length):
        plain = _keys(outcomes, PLAIN, length)
        assert plain is not None
        sentence += (
            f"; it recalls {keys.show()} of the keys, instead of {plain.show()} (n = {keys.n})"
        )
    return sentence + "."


def _cell(outcomes: Sequence[Outcome], model: str, at: int, word: str) -> TableCell | None:
    cells = (cell for outcome in outcomes for cell in outcome.table.cells)
    return next((c for c in cells if (c.model, c.at) == (model, at) and word in c.metric), None)


def _loss(outcomes: Sequence[Outcome], model: str, at: int) -> Estimate | None:
    cells = [c for c in outcomes[0].table.cells if (c.model, c.at) == (model, at)]
    return next((c.estimate for c in cells if c.metric.endswith("bits per byte")), None)


def _keys(outcomes: Sequence[Outcome], model: str, at: int) -> Estimate | None:
    cell = _cell(outcomes, model, at, "recalled")
    return None if cell is None else cell.estimate


def _written(
    checkpoint: str, model: Any, members: Sequence[dict[str, Any]], destination: Path
) -> Path | None:
    """Write the repaired checkpoint in its own layout if the repair folds, else in ours."""
    under = model.under([mitigation(member) for member in members])
    name = CheckpointName.parse(checkpoint).checkpoint
    is_whole = not fold(copy.deepcopy(under)).parts()
    if not is_whole and not isinstance(model, RecurrentLM):
        return None
    if not destination.exists():
        write_checkpoint(under, name, destination, layout_of(name) if is_whole else OURS)
    return destination
