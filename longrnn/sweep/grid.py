"""Grids: every combination of values over one configuration, checked before any run starts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from longrnn.config import build_config, flat
from longrnn.errors import UserError, nearest
from longrnn.files import file_name
from longrnn.models.recurrent import RecurrentConfig
from longrnn.registry import keyword_options
from longrnn.training.checks import check, check_one_process
from longrnn.training.config import TrainConfig
from longrnn.training.differences import FAMILIES, with_defaults
from longrnn.training.folder import HARMLESS
from longrnn.training.models import tokenizer_of
from longrnn.training.sources import build_task

Axes = dict[str, list[str]]


class GridRun(NamedTuple):
    """One run of a grid.

    Attributes:
        name: name of its folder.
        values: the value of each key of the grid, as given.
        config: configuration of the run.
    """

    name: str
    values: dict[str, str]
    config: TrainConfig

    def content(self) -> dict[str, Any]:
        """The configuration as dotted keys, without keys that do not affect the result."""
        keys = with_defaults(flat(asdict(self.config)))
        return {key: value for key, value in keys.items() if key not in HARMLESS}


def parse_axes(items: Sequence[str]) -> Axes:
    """Keys with their values, from `seed=111,222` and the like.

    Raises:
        UserError: no keys, a key without values or given twice, or one that does not exist.
    """
    if not items:
        raise UserError("the grid is empty: give KEY=VALUE,… such as seed=111,222")
    axes: Axes = {}
    for item in items:
        key, equals, text = item.partition("=")
        values = [value.strip() for value in _split(text)]
        if not key or not equals:
            raise UserError(
                f"grid: {item!r} is not of the form KEY=VALUE,…: write it as in seed=111,222"
            )
        if not all(values):
            raise UserError(f"grid: {item!r} lacks a value: write {key}=VALUE,…")
        if _dotted(key) in map(_dotted, axes):
            raise UserError(f"grid: key {key} is given twice: give all of its values at once")
        axes[key] = values
    return axes


def expand(base: TrainConfig, axes: Axes, folder: Path) -> list[GridRun]:
    """Every combination, the last key's values changing fastest, each checked to be runnable.

    Args:
        base: what all runs have in common.
        axes: of `parse_axes`.
        folder: holds the output folders of the runs.

    Raises:
        UserError: a key that does not exist, values that are the same, or a run that would fail.
    """
    _check_values(base, axes)
    runs = []
    for chosen in itertools.product(*axes.values()):
        values = dict(zip(axes, chosen, strict=True))
        name = run_name(values)
        try:
            config = applied(base, values)
            check_one_process(config)
            check(config)
        except UserError as error:
            raise UserError(f"run {name}: {error}") from error
        config.output_dir = str(folder / name)
        runs.append(GridRun(name, values, config))
    named: dict[str, str] = {}
    for run in runs:
        other = named.setdefault(str(run.content()), run.name)
        if other != run.name:
            raise UserError(
                f"grid: {other} and {run.name} are the same run: leave out one of their keys"
            )
    return runs


def applied(base: TrainConfig, values: dict[str, str]) -> TrainConfig:
    """The configuration with other values.

    A changed kind keeps those options of the former one that it has too. Where the task changes,
    the model gets as many ids as it needs.

    Raises:
        UserError: an unknown key, or a value of the wrong type.
    """
    content = asdict(base)
    if base.init_from is None and "init_from" in values and base.model == RecurrentConfig():
        # What stands for nothing given is that of the checkpoint now.
        content["model"] = None
        content["tokenizer"] = None if base.tokenizer == "bytes" else base.tokenizer
    dotted = {_dotted(key): _parsed(key, text) for key, text in values.items()}
    # Kinds first, then their options.
    for key in sorted(dotted, key=lambda key: not (key in FAMILIES or key.endswith(".kind"))):
        _put(content, key, dotted[key])
    config = build_config(TrainConfig, content, source="grid")
    changed = any(key.split(".")[0] == "task" for key in dotted)
    if changed and "model.vocab_size" not in dotted and config.init_from is None and config.model:
        task = build_task(config.task, tokenizer_of(config)[1])
        config.model.vocab_size = task.vocab_size
    return config


def run_name(values: dict[str, str]) -> str:
    """The unique folder name of a run."""
    whole = ",".join(f"{key}={value}" for key, value in values.items())
    return file_name(whole)


def _check_values(base: TrainConfig, axes: Axes) -> None:
    """Raises UserError if two values of a key give the same run."""
    first = {key: values[0] for key, values in axes.items()}
    for key, values in axes.items():
        seen: dict[str, str] = {}
        for value in values:
            point = GridRun("", first, applied(base, first | {key: value}))
            content = str(point.content())
            if content in seen:
                raise UserError(
                    f"grid: {key}={seen[content]} and {key}={value} are the same run: give one"
                )
            seen[content] = value


def _dotted(key: str) -> str:
    """The configuration's own key: `position.kind` is that of the model, `vocab_size` the task's.

    Raises:
        UserError: there is none.
    """
    head = key.split(".")[0]
    own = {field.name for field in fields(TrainConfig)} - {"output_dir"}
    of_model = {field.name for field in fields(RecurrentConfig)}
    if key == "output_dir":
        raise UserError(
            "grid: every run gets an output_dir of its own: give their folder with --output"
        )
    if head in own:
        return key
    if key == "vocab_size":
        return "task.vocab_size"
    if head in of_model:
        return f"model.{key}"
    raise UserError(f"grid: unknown key {key}: {nearest(head, own | of_model)}")


def _parsed(key: str, text: str) -> Any:
    """A value as an override of `longrnn train` would have it."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        content: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except YAMLError as error:
        raise UserError(
            f"grid: {key}={text} is not YAML ({' '.join(str(error).split())}): write the value in "
            "quotes"
        ) from error
    return content["value"]


def _put(content: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key in a nested mapping."""
    *path, last = key.split(".")
    for part in path:
        if content.get(part) is None:
            content[part] = {}
        content = content[part]
        if not isinstance(content, dict):
            raise UserError(f"grid: {key} has no keys below {part}: leave out what follows it")
    family = FAMILIES.get(".".join(path))
    if last == "kind" and family is not None:
        known = keyword_options(family[str(value)])
        for option in [name for name in content if name not in known]:
            del content[option]
    content[last] = value


def _split(text: str) -> list[str]:
    """`text` at its commas, but for those within brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += (character in "[{") - (character in "]}") if not quote else 0
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts
