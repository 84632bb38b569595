"""`longrnn sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.options import Configuration, Quiet, lock_output, pick_device
from longrnn.cli.train import terminable
from longrnn.errors import UserError


def sweep(
    config: Configuration,
    values: Annotated[
        list[str] | None,
        typer.Argument(
            help="Further keys of the grid; a single value applies to all runs.",
            metavar="[KEY=VALUE,…]...",
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,…", help="Values to try for a key; may be given several times."
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Runs that the other runs with the same seed are compared with.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for runs and results.", show_default="output_dir of CONFIG + -sweep"
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at the same time.", show_default="one per device")
    ] = None,
    devices: Annotated[
        str, typer.Option(help="Where to run: cpu, or a list such as cuda:0,cuda:1.")
    ] = "auto",
    quiet: Quiet = False,
) -> None:
    """Train every combination of values, several runs at a time, and compare them.

    Keys are those of the configuration. position.… and mixer.… are short for keys of the model;
    vocab_size is that of the task, and the model gets as many ids as the task needs. All runs are
    checked before the first is trained. The same command resumes an interrupted sweep and repeats
    failed runs; more values may be added.

    Example: longrnn sweep reverse_small --grid position.kind=none,duplicate,sinusoidal vocab_size=32,256 seed=111,222,333 --baseline position.kind=duplicate --jobs 2
    """  # noqa: E501 (an example that can be copied)
    with terminable():
        from longrnn.config import load_config
        from longrnn.files import write_atomic
        from longrnn.sweep.grid import expand, parse_axes
        from longrnn.sweep.runs import Sweep
        from longrnn.sweep.table import markdown, parse_baseline
        from longrnn.training.config import TrainConfig

        axes = parse_axes([*(grid or []), *(values or [])])
        base = load_config(TrainConfig, config)
        against = None if baseline is None else parse_baseline(baseline, axes)
        targets = [pick_device(device.strip()) for device in devices.split(",")]
        folder = lock_output(output or Path(f"{base.output_dir}-sweep"))
        points = expand(base, axes, folder / "runs")
        found = Sweep(
            points,
            folder,
            devices=targets,
            jobs=len(targets) if jobs is None else jobs,
            quiet=quiet,
        )
        rows, failures = found.run()
        lines = markdown(rows, axes, against)
        write_atomic(folder / "table.md", "\n".join(lines) + "\n")
        typer.echo("\n".join([*lines, "", str(folder / "results.jsonl"), str(folder / "table.md")]))
        if failures:
            listed = "; ".join(f"{f.name} ({f.reason}; see {f.log})" for f in failures)
            raise UserError(
                f"{len(failures)} of {len(points)} runs failed; give the same command to run them "
                f"again: {listed}"
            )
