"""What `longrnn eval reverse` and `longrnn eval task` do."""

from __future__ import annotations

from pathlib import Path

import typer

from longrnn.cli.options import lock_output, pick_device, results_folder, training
from longrnn.errors import UserError, nearest


def evaluate_sequences(
    checkpoint: str,
    kind: str | None,
    vocab_size: int | None,
    length: int | None,
    n: int | None,
    output: Path | None,
    device: str,
    quiet: bool,
) -> None:
    """Measures a checkpoint on a task of sequences and prints its scores.

    Args:
        checkpoint: name or folder.
        kind: the task; None for the one that it was trained on.
        vocab_size: V; None for that of training, as every option of the task that is not asked.
        length: of the sequences; None likewise.
        n: held-out sequences; None for all.
        output: folder of the results.
        device: as in `pick_device`.
        quiet: no progress.

    Raises:
        UserError: a task of another kind, or one that training says too little of.
    """
    from longrnn.evaluation import sequences as measure
    from longrnn.hf.loading import load, resolve
    from longrnn.hf.specs import split_spec
    from longrnn.inference.length_limit import refuse_long
    from longrnn.tasks import TASKS, SequenceTask

    trained = training(resolve(split_spec(checkpoint)[0]))
    options = dict(trained.get("task", {}))
    of_training = str(options.pop("kind", None))
    known = [name for name, task in TASKS.items() if issubclass(task, SequenceTask)]
    if kind is not None and kind not in known:
        raise UserError(f"no task of sequences {kind!r}: {nearest(kind, known)}")
    if kind is None and of_training not in known:
        raise UserError(
            f"{checkpoint} was not trained on a task of sequences: give --task, one of "
            f"{', '.join(sorted(known))}"
        )
    kind = of_training if kind is None else kind
    if kind != of_training:
        options = {}
    elif length is None:
        length = trained.get("length", {}).get("max")
    if vocab_size is not None:
        options["vocab_size"] = vocab_size
    if "vocab_size" not in options or length is None:
        raise UserError(f"{checkpoint} was not trained on {kind}: give --vocab-size and --length")
    task = TASKS.build({"kind": kind, **options}, None)
    assert isinstance(task, SequenceTask)
    model = load(checkpoint, device=pick_device(device))
    refuse_long(model, task.width(length))
    folder = lock_output(output or results_folder(kind, [checkpoint]))
    rows = measure.evaluate(
        model, task, length=length, n=n, output=folder / "results.jsonl", quiet=quiet
    )
    found = measure.summarise(rows)
    width = max(16, *(len(name) + 2 for name in found))
    for name, estimate in found.items():
        typer.echo(f"{name:<{width}}{estimate}  (n = {estimate.n}, 95 % interval)")
    typer.echo(str(folder / "results.jsonl"))
