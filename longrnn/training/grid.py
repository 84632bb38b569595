"""`longrnn train --grid`: every combination of values, one run after another.

Each run has a folder of its own. Processes that run the same grid at the same time share it, since
a run has one writer. A run that diverged is a result: it is recorded, and not repeated.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from longrnn.checksums import CHECKSUMS
from longrnn.config import RECORDED, read_recorded
from longrnn.errors import DivergedError, UserError
from longrnn.files import file_name, write_atomic
from longrnn.locks import LockedError
from longrnn.training.config import TrainConfig, changes, configured
from longrnn.training.distributed import build_accelerator
from longrnn.training.run import Run, read_runs
from longrnn.training.train import train
from longrnn.training.trainer import Trainer
from longrnn.units import counted

# The file that a run which diverged leaves in its folder, with the reason.
DIVERGED = "diverged.txt"


def split_values(text: str) -> list[str]:
    """The values of `1e-3,3e-4`; a list, mapping or call in brackets is one value."""
    values, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def grid_of(config: str | Path, overrides: Sequence[str]) -> list[TrainConfig]:
    """The runs of a grid, whose folders are those inside `output_dir`.

    Args:
        config: the path or name of a configuration.
        overrides: `key=value`; where a value is a list `a,b,c`, runs have one of them each.

    Raises:
        UserError: no key has several values, or a run is not valid.
    """
    choices: dict[str, list[str]] = {}
    for override in overrides:
        name, _, text = override.partition("=")
        if name in choices:
            raise UserError(f"{name} is given twice: write one list, such as {name}=A,B")
        choices[name] = split_values(text)
    varied = [name for name, values in choices.items() if len(values) > 1]
    if not varied or "output_dir" in varied:
        raise UserError(
            "a grid varies at least one key, and not output_dir: give lists such as "
            "learning_rate=1e-3,3e-4 seed=0,1"
        )
    runs = []
    for values in itertools.product(*choices.values()):
        given = dict(zip(choices, values, strict=True))
        settings = configured(config, [f"{name}={value}" for name, value in given.items()])
        title = ",".join(f"{name}={given[name]}" for name in varied)
        settings.output_dir = str(Path(settings.output_dir) / file_name(title))
        runs.append(settings)
    return runs


def run_grid(config: str | Path, overrides: Sequence[str], *, quiet: bool) -> Iterator[str]:
    """Trains what is missing of a grid; yields one line per run.

    Raises:
        UserError: see `grid_of`, and `longrnn.training.train.train`; or a folder holds a run with
            other values, or this is a process of a launch.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            "the runs of a grid have one process each: give the command without `longrnn launch`, "
            "also several times at once"
        )
    runs = grid_of(config, overrides)
    for settings in runs:
        _refuse_others(settings)
    for settings in runs:  # before the first one is trained
        if not (Path(settings.output_dir) / RECORDED).is_file():
            Trainer(settings, build_accelerator(settings), quiet=True)
    for settings in runs:
        folder = Path(settings.output_dir)
        if (folder / DIVERGED).is_file():
            yield f"{folder}: diverged before; {(folder / DIVERGED).read_text().strip()}"
            continue
        if (folder / CHECKSUMS).is_file():  # the last file of the final model
            yield _line(read_runs([folder])[0])
            continue
        is_begun = (folder / RECORDED).is_file()
        try:
            yield _line(train(settings, resume=folder if is_begun else None, quiet=quiet))
        except LockedError:
            yield f"{folder}: another process trains it"
        except DivergedError as error:
            write_atomic(folder / DIVERGED, f"{error}\n")
            yield f"{folder}: diverged; {error}"


def _refuse_others(settings: TrainConfig) -> None:
    """Refuses a folder with a run of other values, whose result is not that of `settings`."""
    folder = settings.output_dir
    if recorded := read_recorded(Path(folder)):
        before = configured(recorded | {"output_dir": folder})
        if different := changes(before, settings):
            raise UserError(
                f"{folder} holds a run with other values ({different[0]}): choose another "
                "output_dir, or remove it"
            )


def _line(run: Run) -> str:
    loss = run.last("loss")
    shown = "unknown" if loss is None else f"{loss:.4g}"
    return f"{run.folder}: loss {shown} after {counted(run.rows[-1]['step'], 'step')}"
