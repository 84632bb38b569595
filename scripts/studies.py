"""What the studies share: training runs, losses by position, intervals, tables and records."""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
import yaml
from scipy.stats import t as student
from torch import Tensor

from longrnn import LanguageModel, load_tokenizer
from longrnn.config import RECORDED
from longrnn.errors import UserError

CONFIGS = Path(__file__).parents[1] / "configs/train"
UNSCORED = -100


class Estimate(NamedTuple):
    """A mean with its 95 % interval (Student t); both ends are infinite for one value."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def verdict(self) -> str:
        """`higher` or `lower` than 0, or `inconclusive` if the interval contains 0."""
        return "higher" if self.low > 0 else "lower" if self.high < 0 else "inconclusive"


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of independent values with its interval."""
    middle, half = mean(values), math.inf
    if len(values) > 1:
        half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return Estimate(middle, middle - half, middle + half)


def differences(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """Returns the mean of paired differences."""
    return estimate([a - b for a, b in zip(values, others, strict=True)])


def options(description: str | None, output: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that all studies have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path(output), help="folder for everything")
    return parser


def train(base: str | dict[str, Any], output: Path, settings: dict[str, Any]) -> Path:
    """Trains a run with `longrnn train`, unless it is finished, and returns its folder.

    Args:
        base: the name of a configuration in `configs/train`, or a whole one.
        output: folder of the run; an unfinished run there is resumed.
        settings: values that replace those of the configuration, by dotted key.
    """
    if (output / "model.safetensors").exists():
        return output
    if (output / RECORDED).exists():
        command("train", "--resume", str(output), "--quiet")
        return output
    config = base if isinstance(base, dict) else yaml.safe_load((CONFIGS / f"{base}.yaml").open())
    for key, value in {**settings, "output_dir": str(output)}.items():
        *path, last = key.split(".")
        place = config
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    file = output.with_name(f"{output.name}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(config))
    command("train", str(file), "--quiet")
    return output


def command(*arguments: str) -> None:
    """Runs a command of longrnn; its errors end the study."""
    found = str(Path(__file__).parents[1])
    path = os.pathsep.join([found, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "longrnn.cli", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.returncode)


def text_task(files: Sequence[Path]) -> dict[str, Any]:
    """Returns the task of a training configuration that reads books.

    Raises:
        UserError: a file does not exist.
    """
    for file in files:
        if not file.is_file():
            raise UserError(f"there is no text at {file}: save the book there, or name another")
    return {"kind": "text", "data": [str(file) for file in files]}


def windows(files: Sequence[Path], checkpoint: str, length: int, count: int) -> Tensor:
    """Returns the first windows of each text, `(count · files, length + 1)` tokens.

    Raises:
        UserError: a text is missing or too short.
    """
    text_task(files)
    tokenizer, found = load_tokenizer(checkpoint), []
    for file in files:
        tokens = torch.tensor(tokenizer.encode(file.read_text(encoding="utf-8")))
        if len(tokens) < length * count + 1:
            raise UserError(
                f"{file} has {len(tokens):,} tokens and {count} windows of {length:,} need "
                f"{length * count + 1:,}: give a longer text, or fewer or shorter windows"
            )
        found += [tokens[k * length : (k + 1) * length + 1] for k in range(count)]
    return torch.stack(found)


def losses(model: LanguageModel, rows: Tensor, batch: int = 16) -> Tensor:
    """Returns the loss of every token after the first, `(rows, length)` float64, in nats."""
    parts = [model.token_losses(part[:, :-1], part[:, 1:])[0] for part in rows.split(batch)]
    return torch.cat(parts).double()


@torch.inference_mode()
def right(model: Any, tokens: Tensor, targets: Tensor, batch: int = 64) -> Tensor:
    """Returns which scored tokens are predicted, `(rows, scored)` bool; -100 is not scored.

    A row whose tokens are all predicted is a right answer of greedy decoding.
    """
    found = []
    for start in range(0, len(tokens), batch):
        logits = model(tokens[start : start + batch]).logits
        wanted = targets[start : start + batch]
        scored = wanted != UNSCORED
        found.append((logits.argmax(-1) == wanted)[scored].view(len(wanted), -1))
    return torch.cat(found)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def record(output: Path, title: str, *blocks: str) -> None:
    """Prints and writes `report.md`: title, date, machine, command, and the blocks."""
    line = shlex.join(["python", *sys.argv])
    where = f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, torch {torch.__version__}"
    text = "\n\n".join([f"# {title}", f"{where}.", f"```\n{line}\n```", *blocks])
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.md").write_text(f"{text}\n")
    print(text)


def run(main: Callable[[], None]) -> None:
    """Runs a study; bad input ends it with one sentence and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
