"""`longrnn.repair`: what is wrong with a model at a length, and the best repair within a budget.

Notable choices:
- The texts are divided: calibrations and the choice read one part, and the proof another one, which
  is read once, at the end. Keys of the proof are not those of the choice.
- The choice is the attempt with the least score: bits per byte in the last half of the length, plus
  the share of keys that it loses. One that folds into weights is taken unless another is better by
  more than `SCORE_MARGIN`.
- Every attempt is recorded when it is finished, with its mappings, score and seconds. The same
  command continues from there; results of evaluations are in stores.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longrnn.diagnostics.attempts import ATTEMPTS, Setting
from longrnn.diagnostics.choice import (
    BITS_PER_BYTE,
    KEYS_RECALLED,
    UNREPAIRED,
    Choice,
    cell_of,
    passkeys,
)
from longrnn.diagnostics.states import Diagnosis, diagnose
from longrnn.errors import UserError
from longrnn.evaluation.run import Outcome, run_and_report
from longrnn.evaluation.suites import build_evaluation
from longrnn.evaluation.texts import TEXT_REMEDY, read_documents
from longrnn.files import read_text, remove, write_atomic
from longrnn.hf.convert import OURS, layout_of, write_checkpoint
from longrnn.hf.load import load_editable
from longrnn.hf.names import CheckpointName, required_training_length
from longrnn.hf.opened import OpenCheckpoint
from longrnn.hf.tokenizer import load_tokenizer
from longrnn.locks import hold
from longrnn.mitigations.base import Calibration
from longrnn.mitigations.spec import write_calibration
from longrnn.models import LanguageModel, RecurrentLM
from longrnn.models.fold import fold, unfoldable
from longrnn.reporting.states import summary
from longrnn.units import format_length

REPAIRED = "repaired"
# What a repair writes into its folder.
CHECKPOINT, MITIGATION = "checkpoint", "mitigation.yaml"
# Keyed prompts that a calibration reads, and windows and prompts of the proof.
CALIBRATED_KEYS, PROOF_WINDOWS, PROOF_KEYS = 3, 8, 4
NOTHING_HELPS = (
    "No repair within the budget helps on text that the choice did not see, so no checkpoint is "
    "written: train with carried states (`longrnn finetune`)."
)


class Repair(NamedTuple):
    """The result of a repair.

    Attributes:
        sentences: what is wrong, and then what the repair reached.
        choice: name of the attempt; None if nothing helps.
        checkpoint: the folder that was written; None if nothing helps, or for a hybrid under a
            mitigation that weights cannot express.
        mitigation: the file; None if nothing helps.
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
        quiet: print nothing.

    Raises:
        UserError: the texts are too short, the model cannot be repaired, or the folder holds
            another repair.
    """
    folder = Path(output)
    hold(folder, instead="choose another --output")
    trained = train_length or required_training_length(checkpoint)
    model, tokenizer = load_editable(checkpoint, device=device), load_tokenizer(checkpoint)
    paths = [texts] if isinstance(texts, str | Path) else texts
    choose, prove = divide([Path(path) for path in paths], folder)
    documents = read_documents(choose, tokenizer, model)
    n_keys = CALIBRATED_KEYS if keys else 0
    setting = Setting(model, tokenizer, documents, trained, length, n_keys, quiet)
    choice = Choice(setting, choose, folder, 60 * budget)
    if (folder / CHECKPOINT).exists() and not choice.written:
        raise UserError(f"{folder / CHECKPOINT} is not of this repair: choose another --output")
    seen = diagnose(model, documents[:1], length, train_length=trained, quiet=quiet)
    choice.add(UNREPAIRED, list)
    sentences = wrong(seen, choice)
    _say(sentences, quiet)
    for name, attempt in ATTEMPTS.items():
        if attempt.may_fold or not folds_only:
            choice.attempt(name, attempt)
            _say([choice.line(name)], quiet)
    best = choice.best(folds_only=folds_only)
    members = choice.rows[best]["members"]
    repaired = _folded(setting, members)
    source = CheckpointName.parse(checkpoint)
    models = [OpenCheckpoint(UNREPAIRED, model, tokenizer, source, device or "cpu")]
    if best != UNREPAIRED:
        models.append(OpenCheckpoint(REPAIRED, repaired, tokenizer, source, device or "cpu"))
    outcomes, (_, report, *_) = run_and_report(
        models,
        [build_evaluation(spec) for spec in proof(setting, prove)],
        folder,
        quiet=quiet,
        notes=[*sentences, *choice.lines()],
    )
    _remove_written(choice)
    if best == UNREPAIRED or not helps(outcomes, length):
        return Repair([*sentences, NOTHING_HELPS], None, None, None, report)
    file = folder / MITIGATION
    hashes = tuple(document.sha256 for document in documents)
    write_calibration(file, members, Calibration(str(file), model.fingerprint(), trained, hashes))
    written = _write(repaired, source.checkpoint, folder / CHECKPOINT)
    sentences.append(quote(checkpoint, best, outcomes, setting, prove))
    return Repair(sentences, best, written, file, report)


def _remove_written(choice: Choice) -> None:
    """Remove the checkpoint of an earlier choice, and record that one may be written."""
    if choice.written:
        for name in (CHECKPOINT, MITIGATION):
            remove(choice.folder / name)
    choice.written = True
    choice.record()


def _write(repaired: LanguageModel, source: str, folder: Path) -> Path | None:
    """Write a model in the layout of its source, or in ours if that cannot express it.

    Returns:
        The folder; None for a hybrid under a mitigation that weights cannot express.
    """
    layout = layout_of(source)
    if unfoldable(repaired):
        layout = OURS if isinstance(repaired, RecurrentLM) else ""
    if not layout:
        return None
    write_checkpoint(repaired, source, folder, layout)
    return folder


def divide(texts: Sequence[Path], folder: Path) -> tuple[list[Path], Path]:
    """Return the texts to choose on and the one that proves; halves of a single one are written."""
    if len(texts) > 1:
        return list(texts[:-1]), texts[-1]
    text, _ = read_text(texts[0], TEXT_REMEDY)
    middle = text.find("\n", len(text) // 2) + 1 or len(text) // 2
    halves = folder / f"{texts[0].stem}_choose.txt", folder / f"{texts[0].stem}_prove.txt"
    for path, part in zip(halves, (text[:middle], text[middle:]), strict=True):
        write_atomic(path, part)
    return [halves[0]], halves[1]


def wrong(seen: Diagnosis, choice: Choice) -> list[str]:
    """Return what is wrong: the heads and where they begin, and loss and keys."""
    onsets = [finding.onset for finding in seen.findings if finding.onset is not None]
    start = f" The first leaves its range at token {min(onsets):,}." if onsets else ""
    row, setting = choice.rows[UNREPAIRED], choice.setting
    keys = f", and {row['keys']:.0%} of the keys are recalled" if setting.keys else ""
    return [
        f"{summary(seen)}{start}",
        f"The loss is {row['inside']:.2f} bits per byte inside the training length of "
        f"{format_length(setting.trained)} and {row['loss']:.2f} in the last half of "
        f"{format_length(setting.length)} tokens{keys}.",
    ]


def proof(setting: Setting, prove: Path) -> list[dict[str, Any]]:
    """Return the evaluations that compare the repaired model with the plain one."""
    length, trained = setting.length, setting.trained
    lengths = {trained, *(length // part for part in (16, 4, 2, 1) if length > part * trained)}
    texts = {"texts": [str(prove)], "windows": PROOF_WINDOWS}
    specs: list[dict[str, Any]] = [{"kind": "perplexity", **texts, "lengths": sorted(lengths)}]
    if setting.keys:
        at = [length // part for part in (64, 4, 1) if length >= 512 * part]
        specs.append(passkeys(at or [length], PROOF_KEYS, prove, seed=0))
    return [*specs, {"kind": "cost", "lengths": [min(length, 4096)]}]


def helps(outcomes: Sequence[Outcome], length: int) -> bool:
    """Return whether the loss or the keys at the length are better, by their intervals."""
    loss, keys = (
        cell_of(outcomes, REPAIRED, length, column) for column in (BITS_PER_BYTE, KEYS_RECALLED)
    )
    if keys is not None and keys.difference is not None and keys.difference.low > 0:
        return True
    change = None if loss is None else loss.difference
    return change is not None and (change.high if change.n > 1 else change.mean) < 0


def quote(
    checkpoint: str, name: str, outcomes: Sequence[Outcome], setting: Setting, prove: Path
) -> str:
    """Return the result in a sentence, with intervals."""
    length, trained = format_length(setting.length), format_length(setting.trained)

    def shown(model: str, at: int, column: str) -> str:
        cell = cell_of(outcomes, model, at, column)
        return "–" if cell is None or cell.estimate is None else cell.estimate.show()

    count = cell_of(outcomes, REPAIRED, setting.length, BITS_PER_BYTE)
    assert count is not None
    assert count.estimate is not None
    plain, beyond, plain_inside, inside = (
        shown(model, at, BITS_PER_BYTE)
        for at in (setting.length, setting.trained)
        for model in (UNREPAIRED, REPAIRED)
    )
    sentence = (
        f"{checkpoint}, trained on {trained} tokens and repaired by {name}, has {beyond} bits per "
        f"byte in the last half of {length} tokens of {prove.name}, and {plain} without the repair "
        f"(n = {count.estimate.n} windows); inside the training length it has {inside} and "
        f"{plain_inside}"
    )
    if setting.keys:
        before, after = (
            shown(model, setting.length, KEYS_RECALLED) for model in (UNREPAIRED, REPAIRED)
        )
        sentence += f"; it recalls {after} of the keys at {length}, and {before} without"
    return f"{sentence}."


def _folded(setting: Setting, members: Sequence[dict[str, Any]]) -> Any:
    """Return a copy of the model under a mitigation, of which it folds what folds."""
    under = copy.deepcopy(setting.model).under(list(members))
    return under.under(None).under(fold(under))


def _say(lines: Sequence[str], quiet: bool) -> None:
    if not quiet:
        print("\n".join(lines), flush=True)
