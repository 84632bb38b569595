"""`longrnn eval reverse` and `longrnn eval task`."""

from __future__ import annotations

from pathlib import Path

import typer

from longrnn.cli.options import lock_output, pick_device
from longrnn.cli.results_folders import results_folder
from longrnn.config import read_recorded
from longrnn.errors import UserError, nearest
from longrnn.processes import is_main
from longrnn.units import parse_length


def evaluate_sequences(
    checkpoint: str,
    kind: str | None,
    vocab_size: int | None,
    length: str | None,
    n: int | None,
    output: Path | None,
    device: str,
    quiet: bool,
) -> None:
    """Evaluates a checkpoint on a sequence task and prints its scores.

    Args:
        checkpoint: name or folder.
        kind: name of the task; None for the one that it was trained on.
        vocab_size: of the task; None for that of training, like all other options of the task.
        length: of the sequences in tokens; None for the training length.
        n: number of held-out sequences; None for all.
        output: folder for the results; None for the default one.
        device: as in `pick_device`.
        quiet: whether to show no progress.

    Raises:
        UserError: not a sequence task, or the training configuration lacks an option of it.
    """
    from longrnn.data import TASKS, SequenceTask
    from longrnn.evaluation import sequences as measure
    from longrnn.hf.load import load
    from longrnn.hf.names import resolve, split_spec
    from longrnn.inference.engine import refuse_long

    tokens = None if length is None else parse_length(length)
    trained = read_recorded(resolve(split_spec(checkpoint)[0]))
    options = dict(trained.get("task", {}))
    trained_kind = str(options.pop("kind", None))
    known = [name for name, task in TASKS.items() if issubclass(task, SequenceTask)]
    if kind is not None and kind not in known:
        raise UserError(f"unknown sequence task {kind!r}: {nearest(kind, known)}")
    if kind is None and trained_kind not in known:
        raise UserError(
            f"{checkpoint} was not trained on a sequence task: give --task, one of "
            f"{', '.join(sorted(known))}"
        )
    kind = trained_kind if kind is None else kind
    if kind != trained_kind:
        options = {}
    elif tokens is None:
        tokens = trained.get("length", {}).get("max")
    if vocab_size is not None:
        options["vocab_size"] = vocab_size
    if "vocab_size" not in options or tokens is None:
        raise UserError(f"{checkpoint} was not trained on {kind}: give --vocab-size and --length")
    task = TASKS.build({"kind": kind, **options}, None)
    assert isinstance(task, SequenceTask)
    model = load(checkpoint, device=pick_device(device))
    refuse_long(model, task.width(tokens))
    folder = lock_output(output or results_folder(kind, [checkpoint]))
    rows = measure.evaluate(
        model, task, length=tokens, n=n, output=folder / "results.jsonl", quiet=quiet
    )
    if not is_main():
        return
    found = measure.summarise(rows)
    width = max(16, *(len(name) + 2 for name in found))
    for name, estimate in found.items():
        typer.echo(f"{name:<{width}}{estimate}  (n = {estimate.n}, 95 % interval)")
    typer.echo(str(folder / "results.jsonl"))
