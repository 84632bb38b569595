"""`longrnn diagnose stability` and `longrnn diagnose attribution`: gradients along a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.options import Device, Quiet, pick_device
from longrnn.config import read_recorded
from longrnn.console import print_table
from longrnn.errors import UserError


def stability(
    run: Annotated[
        Path, typer.Argument(help="output_dir of a training run on a reverse task or sort.")
    ],
    n: Annotated[
        int, typer.Option("--n", help="Triplets of inputs for each condition and checkpoint.")
    ] = 1024,
    seed: Annotated[int, typer.Option(help="Random seed of the triplets.")] = 0,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Compare the gradients of inputs that share tokens, for every checkpoint of a run.

    The gradient is the Jacobian of the last output with respect to the state after the first token.
    It is compared between inputs that share the first token, and between inputs that share all
    other tokens (arXiv 2402.00236): 1 for equal gradients, 0 for orthogonal ones. A run on
    reverse_dual_frequency is measured with frequent and rare tokens separately. Keep more
    checkpoints with save_steps and save_total_limit.

    Example: longrnn diagnose stability runs/reverse-small --n 64
    """
    from longrnn.data import TASKS, Transduction
    from longrnn.studies.stability import along_checkpoints, rows

    trained = read_recorded(run)
    task = TASKS.build(trained["task"], None) if "task" in trained else None
    length = trained.get("length", {}).get("max")
    if not isinstance(task, Transduction) or length is None:
        raise UserError(
            f"{run} is not a run on a task such as reverse or sort: give the output_dir of one"
        )
    target = pick_device(device)
    measured = along_checkpoints(
        run, task, length=length, n=n, seed=seed, device=target, quiet=quiet
    )
    _print(
        f"gradient stability, {n:,} triplets per condition [95 % interval]",
        ["condition", "same first token", "same suffix", "norm of J"],
        rows(measured),
    )


def attribution(
    run: Annotated[
        Path,
        typer.Argument(help="output_dir of a training run on reverse_dual_frequency or on a text."),
    ],
    n: Annotated[int, typer.Option("--n", help="Sequences, drawn as in training.")] = 1024,
    seed: Annotated[int, typer.Option(help="Random seed of the sequences.")] = 0,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Attribute the gradient to rare and frequent tokens, for every checkpoint of a run.

    Sums the squares of the gradient of one sequence's loss at the embedding rows of the rare and of
    the frequent tokens (arXiv 2402.00236). "Per token" is the mean over the rows that the sequence
    has. In a text, the least frequent tokens that make up an eighth of it are rare. Keep more
    checkpoints with save_steps and save_total_limit.

    Example: longrnn diagnose attribution runs/reverse-dual --n 256
    """
    from longrnn.data import TASKS
    from longrnn.hf.tokenizer import load_tokenizer
    from longrnn.studies.attribution import along_checkpoints, rows

    trained = read_recorded(run)
    length = trained.get("length", {}).get("max")
    if "task" not in trained or length is None:
        raise UserError(
            f"{run} has no train.yaml with its task: give the output_dir of a training run"
        )
    task = TASKS.build(trained["task"], load_tokenizer(trained.get("tokenizer") or "bytes"))
    target = pick_device(device)
    measured = along_checkpoints(
        run, task, length=length, n=n, seed=seed, device=target, quiet=quiet
    )
    _print(
        f"squared gradient at the embedding rows, {n:,} sequences [95 % interval]",
        ["rare", "frequent", "share of rare", "per rare token", "per frequent token"],
        rows(measured),
    )


def _print(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Prints a table whose first column is the step of the checkpoint."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("step", justify="right")
    for name in columns:
        table.add_column(name)
    for row in cells:
        table.add_row(*row)
    print_table(table, 180)
