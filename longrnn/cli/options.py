"""Options that several commands share, and what they mean."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from longrnn.cli.command import Argument
from longrnn.console import say
from longrnn.errors import UserError
from longrnn.files import file_name
from longrnn.options import Options, Tokens


class Device(Options):
    """Where models run."""

    device: str = "auto"
    """Where to run: cpu, cuda, cuda:1; auto uses cuda if it is available."""


class Mitigated(Options):
    """What is done to models."""

    mitigation: str | None = None
    """Mitigation of state collapse: 'sliding_window(window=8192)', or a file of `calibrate`."""

    def under(self, checkpoint: str) -> str:
        """Return the name of a checkpoint under the mitigation, after its own."""
        from longrnn.checkpoints.names import DTYPE_NAMES

        if self.mitigation is None:
            return checkpoint
        first = self.mitigation.partition("+")[0].strip()
        if first in DTYPE_NAMES:
            raise UserError(f"--mitigation {first} is a dtype: write {checkpoint}+{first} instead")
        return f"{checkpoint}+{self.mitigation}"


class Source(Device):
    """One model, without a mitigation."""

    checkpoint: Annotated[str, Argument("CHECKPOINT")]
    """Name of an embedded checkpoint, a folder, or organisation/model on the Hub."""


class Model(Source, Mitigated):
    """One model."""


class Models(Device, Mitigated):
    """Models to evaluate."""

    checkpoints: Annotated[list[str], Argument("CHECKPOINT")]
    """Names of embedded checkpoints, folders, or organisation/model on the Hub, also with
    +MITIGATION or +DTYPE; the others are compared with the first."""


class TrainLength(Options):
    """How a model was trained."""

    train_length: Tokens | None = None
    """Length that the model was trained on (default: that of its train.yaml)."""


class Output(Options):
    """Where results go."""

    output: Path | None = None
    """Folder for the results (default: results/COMMAND/NAMES, with what is measured)."""

    def folder(
        self,
        command: str,
        names: Sequence[str],
        variant: str | Sequence[Path] = "",
        file: str = "",
    ) -> Path:
        """Return the folder or a file, by default in `results_folder`, locked until the end."""
        if not file:  # what cannot be drawn is refused before anything is measured
            from longrnn.reporting.figures import default_settings

            with default_settings():
                pass
        place = self.output or results_folder(command, names, variant) / file
        return lock_output(place, "file" if file else "folder")


def results_folder(
    command: str, checkpoints: Sequence[str], variant: str | Sequence[Path] = ""
) -> Path:
    """Return the default folder for the results of a command, which a person can type.

    Results are found by what was measured, whatever the folder is called.

    Args:
        command: name of the folder above it.
        checkpoints: names, or `CHECKPOINT+MITIGATION`.
        variant: what is measured, where it is not the default, or the texts that are read.
    """
    from longrnn.checkpoints.names import split_spec

    parts = []
    for checkpoint in checkpoints:
        path, given = split_spec(checkpoint)
        place = Path(os.path.realpath(path))
        name = place.name
        if name.startswith("checkpoint-"):  # which the checkpoints of all runs are called
            name = f"{place.parent.name}-{name}"
        parts.append("+".join(filter(None, (name, given))))
    what = variant if isinstance(variant, str) else "-".join(text.stem for text in variant)
    name = re.sub(r"[^a-z0-9._-]+", "-", "--".join(filter(None, (*parts, what))).lower())
    return Path("results") / command / file_name(name.strip("-._"))


def lock_output(path: Path, kind: str) -> Path:
    """Lock the folder or file for results until this command ends, and return it.

    Raises:
        UserError: it is of the other kind, or another process is writing there.
        OSError: it is below a file, or this user may not write there.
    """
    from longrnn.locks import hold
    from longrnn.processes import on_main

    present = "folder" if path.is_dir() else "file"
    if path.exists() and present != kind:
        raise UserError(f"{path} is a {present}: give a {kind} by --output")
    on_main(lambda: hold(path, instead="choose another --output"))
    return path


def pick_device(device: str) -> str:
    """Return the device to use: `auto` becomes cuda if it is available, else cpu.

    Of several processes on one machine, each gets its own GPU for `auto` and `cuda`.

    Raises:
        UserError: torch cannot use the device, or has fewer GPUs than there are processes.
    """
    import torch

    from longrnn import processes
    from longrnn.ops.cpu import missing

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and processes.size() > 1:
        device = f"cuda:{processes.local_rank()}"
    processes.check_device(device)
    if device == "cpu":
        reason = missing()
        if reason is not None and sys.stderr.isatty():
            say(f"note: computing with torch alone, which is slower; {reason}", error=True)
    return device
