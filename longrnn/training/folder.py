"""The output folder of a run: whose it is, and what a resumed run may change."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longrnn.config import dump_config
from longrnn.errors import UserError
from longrnn.files import leftovers, write_atomic
from longrnn.training.config import TrainConfig

# What a run writes into its output folder itself.
FILES = ("train.yaml", "metrics.jsonl", "config.json", "model.safetensors")
# Keys that may change between the parts of one run without changing what it computes so far.
HARMLESS = {"output_dir", "save_steps", "save_total_limit", "logging_steps", "num_processes"}


def claim(output_dir: Path, config: TrainConfig, *, resume: bool) -> None:
    """Takes an output folder for a run: makes it where it is missing, and writes `train.yaml`.

    Args:
        output_dir: the folder.
        config: the run.
        resume: whether a run of the same configuration may be in it.

    Raises:
        UserError: the folder holds another run, or one that was not asked to be resumed.
    """
    recorded = output_dir / "train.yaml"
    if recorded.is_file():
        difference = differences(recorded.read_text(), config)
        if difference:
            raise UserError(
                f"{output_dir} holds a run with another configuration ({difference}): "
                "choose another output_dir"
            )
        if not resume:
            raise UserError(
                f"{output_dir} holds this run already: add --resume to go on with it, or choose "
                "another output_dir"
            )
    # A kill during the first write below leaves half a file, which is nobody's.
    elif output_dir.is_dir() and set(output_dir.iterdir()) - set(leftovers(recorded)):
        raise UserError(f"{output_dir} is not empty and holds no run: choose another output_dir")
    write_atomic(recorded, dump_config(config))
    for unfinished in output_dir.glob(".checkpoint-*.partial"):
        shutil.rmtree(unfinished)
    for name in FILES:
        for unfinished in leftovers(output_dir / name):
            unfinished.unlink()


def differences(recorded: str, config: TrainConfig) -> str:
    """Which keys of a recorded configuration (YAML) differ from a run's, harmless ones left out."""
    import yaml

    before, now = _flat(yaml.safe_load(recorded)), _flat(asdict(config))
    keys = [k for k in {**before, **now} if before.get(k) != now.get(k)]
    # Every schedule but `constant` has another learning rate at every step of a longer run.
    length = {"max_steps"} if config.lr_scheduler_type == "constant" else set()
    return ", ".join(
        f"{key}: {before.get(key)} there, {now.get(key)} here"
        for key in keys
        if key not in HARMLESS | length
    )


def cut_metrics(output_dir: Path, step: int) -> None:
    """Drops the rows of steps after `step`, which will be run again, and a torn last row."""
    path = output_dir / "metrics.jsonl"
    if not path.is_file():
        return
    lines = path.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    write_atomic(path, "".join(row for row in whole if json.loads(row)["step"] <= step))


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys."""
    if isinstance(tree, dict):
        items = [_flat(value, f"{prefix}{key}.") for key, value in tree.items()]
        return {key: value for item in items for key, value in item.items()}
    return {prefix.rstrip("."): tree}
