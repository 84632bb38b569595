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

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longrnn.checkpoints.convert import OURS, layout_of, write_checkpoint
from longrnn.checkpoints.names import CheckpointName, resolve
from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.console import say
from longrnn.diagnostics.attempts import ATTEMPTS
from longrnn.diagnostics.choice import TRIED, UNREPAIRED, Choice, passkeys, scores
from longrnn.diagnostics.job import Job
from longrnn.diagnostics.states import diagnose
from longrnn.errors import UserError
from longrnn.evaluation.base import Evaluation
from longrnn.evaluation.run import build_evaluation, run
from longrnn.evaluation.texts import TEXT_REMEDY
from longrnn.files import read_text, remove, write_atomic
from longrnn.locks import hold
from longrnn.models import LanguageModel, RecurrentLM
from longrnn.models.fold import fold, unfoldable
from longrnn.reporting.states import summary
from longrnn.reporting.tables import ResultTable, write_report
from longrnn.units import counted, format_length

# What a repair writes into its folder.
CHECKPOINT, MITIGATION = "checkpoint", "mitigation.yaml"
WEIGHTS_FILE = "weights.safetensors"  # which the mitigation names
# Keyed prompts that a calibration reads, and windows and prompts of the proof. After a fit for 64k
# tokens with 3 such prompts, a strict filter recalled no key (docs/results.md).
CALIBRATED_KEYS, PROOF_WINDOWS, PROOF_KEYS = 4, 8, 4
NOTHING_HELPS = (
    "No repair within the budget helps on text that the choice did not see, so no checkpoint is "
    "written: train with carried states (`longrnn finetune`)."
)
NOT_NEEDED = (
    "The loss does not rise beyond the training length, and no repair within the budget lowers it: "
    "use the model as it is; no checkpoint is written."
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
    source = CheckpointName.parse(checkpoint)
    resolve(source.checkpoint)  # before anything is written
    hold(folder, instead="choose another --output")
    paths = [texts] if isinstance(texts, str | Path) else texts
    choose, prove = divide([Path(path) for path in paths], folder)
    job = Job.open(checkpoint, choose, train_length, length, device=device, quiet=quiet)
    job = job._replace(weights_file=folder / WEIGHTS_FILE)
    for path in (folder / CHECKPOINT, folder / MITIGATION):
        if path.exists() and not (folder / TRIED).exists():
            raise UserError(f"{path} is not of this repair: choose another --output")
    choice = Choice(job, CALIBRATED_KEYS if keys else 0, choose, folder)
    models = [OpenCheckpoint(checkpoint, job.model, job.tokenizer, source, device or "cpu")]
    evaluations = proof(choice, prove)
    for evaluation in evaluations:
        evaluation.plan(models)  # refuses a short text before anything is tried
    sentences = wrong(choice)
    _say(sentences, quiet)
    for name, attempt in ATTEMPTS.items():
        if attempt.may_fold or not folds_only:
            choice.attempt(name, 60 * budget)
            _say([choice.line(name)], quiet)
    best = choice.best(folds_only=folds_only)
    # A copy, because folding changes weights.
    repaired: Any = copy.deepcopy(job.under(choice.rows[best].members or []).model)
    repaired = repaired.under(None).under(fold(repaired))
    if best != UNREPAIRED:
        models.append(models[0]._replace(name=f"{checkpoint}, repaired", model=repaired))
    tables = run(models, evaluations, folder, quiet=quiet)
    is_better = best != UNREPAIRED and helps(job, tables)
    if is_better:
        sentences.append(quote(checkpoint, best, tables, job, prove))
    else:
        sentences.append(NOT_NEEDED if choice.is_whole() else NOTHING_HELPS)
    notes = [*sentences, f"Tried on {', '.join(path.name for path in choose)}:", *choice.lines()]
    _, page, *_ = write_report(tables, models, folder, notes)
    for name in (CHECKPOINT, MITIGATION):
        remove(folder / name)  # of an earlier choice
    if not is_better:
        return Repair(sentences, None, None, None, page)
    job.write(folder / MITIGATION, choice.rows[best].members or [])
    written = _write(repaired, source.checkpoint, folder / CHECKPOINT)
    return Repair(sentences, best, written, folder / MITIGATION, page)


def _write(repaired: LanguageModel, source: str, folder: Path) -> Path | None:
    """Write a model in the layout of its source, or in ours if that cannot express it.

    Returns:
        The folder; None for a hybrid under a mitigation that weights cannot express.
    """
    layout = layout_of(source)
    if unfoldable(repaired):
        if not isinstance(repaired, RecurrentLM):
            return None
        layout = OURS
    write_checkpoint(repaired, source, folder, layout)
    return folder


def divide(texts: Sequence[Path], folder: Path) -> tuple[list[Path], Path]:
    """Return the texts to choose on and the one that proves; halves of a single one are written."""
    if not texts:
        raise UserError(f"no text was given: {TEXT_REMEDY}")
    *others, last = texts
    text, digest = read_text(last, TEXT_REMEDY)
    for other in others:
        if read_text(other, TEXT_REMEDY)[1] == digest:
            raise UserError(
                f"{last} has the same content as {other}, on which the repair is chosen: give "
                "another last --text, or this one alone"
            )
    if others:
        return others, last
    middle = text.find("\n", len(text) // 2) + 1 or len(text) // 2
    halves = folder / f"{texts[0].stem}_choose.txt", folder / f"{texts[0].stem}_prove.txt"
    for path, part in zip(halves, (text[:middle], text[middle:]), strict=True):
        write_atomic(path, part)
    return [halves[0]], halves[1]


def wrong(choice: Choice) -> list[str]:
    """Observe the model, and return what is wrong: the heads and their onset, loss and keys."""
    job, text = choice.job, choice.job.documents[:1]
    trained, length = job.train_length, job.target_length
    seen = diagnose(job.model, text, length, train_length=trained, quiet=job.quiet)
    onsets = [finding.onset for finding in seen.findings if finding.onset is not None]
    start = f" The first leaves its range at token {min(onsets):,}." if onsets else ""
    if UNREPAIRED not in choice.rows:
        choice.add(UNREPAIRED, list)
    row = choice.rows[UNREPAIRED]
    keys = f", and {row.keys:.0%} of the keys are recalled" if choice.keys else ""
    return [
        f"{summary(seen)}{start}",
        f"The loss is {row.inside:.2f} bits per byte inside the training length of "
        f"{format_length(trained)} and {row.loss:.2f} in {job.end}{keys}.",
    ]


def proof(choice: Choice, prove: Path) -> list[Evaluation[Any]]:
    """Return the evaluations that compare the repaired model with the unrepaired one."""
    length, trained = choice.job.target_length, choice.job.train_length
    lengths = {trained, *(length // part for part in (16, 4, 2, 1) if length > part * trained)}
    texts = {"texts": [str(prove)], "windows": PROOF_WINDOWS}
    specs: list[dict[str, Any]] = [{"kind": "perplexity", **texts, "lengths": sorted(lengths)}]
    if choice.keys:
        at = [length // part for part in (64, 4, 1) if length >= 512 * part]
        specs.append(passkeys(at or [length], PROOF_KEYS, prove, seed=0))
    specs.append({"kind": "cost", "lengths": [min(length, 4096)]})
    return [build_evaluation(spec) for spec in specs]


def helps(job: Job, tables: Sequence[ResultTable]) -> bool:
    """Return whether the loss or the keys at the length are better, by their intervals."""
    change = scores(job, tables, -1, "difference")
    if "keys" in change and change["keys"].low > 0:
        return True
    loss = change.get("loss")
    return loss is not None and (loss.high if loss.n > 1 else loss.mean) < 0


def quote(checkpoint: str, name: str, tables: Sequence[ResultTable], job: Job, prove: Path) -> str:
    """Return the result in a sentence, with intervals."""
    length, trained = format_length(job.target_length), format_length(job.train_length)
    plain, repaired = (scores(job, tables, model) for model in (0, 1))
    windows = counted(repaired["loss"].n, "window")
    if not repaired["loss"].has_interval:
        windows += ", which is too little text for intervals"
    sentence = (
        f"{checkpoint}, trained on {trained} tokens and repaired by {name}, has "
        f"{repaired['loss'].show()} bits per byte in {job.end} of {prove.name}, and "
        f"{plain['loss'].show()} without the repair (n = {windows}); inside the training length "
        f"it has {repaired['inside'].show()} and {plain['inside'].show()}"
    )
    if "keys" in repaired:
        sentence += (
            f"; it recalls {repaired['keys'].show()} of the keys at {length}, and "
            f"{plain['keys'].show()} without (n = {counted(repaired['keys'].n, 'prompt')})"
        )
    return f"{sentence}."


def _say(lines: Sequence[str], quiet: bool) -> None:
    if not quiet:
        say(*lines)
