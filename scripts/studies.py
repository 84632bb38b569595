"""What the studies share: training runs, losses by position, intervals, tables and records."""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import longrnn
from longrnn import LanguageModel, load_tokenizer
from longrnn.data.batch import UNSCORED, Batch
from longrnn.errors import UserError
from longrnn.intervals import MEAN, Estimate
from longrnn.programs import run_to_end
from longrnn.training.optim import decays

# The mean of values, and of their paired differences from others.
estimate = MEAN.estimate
differences = MEAN.difference


def verdict(less: Estimate) -> str:
    """Returns `higher` or `lower` than 0, or `inconclusive` if the interval contains 0."""
    return "higher" if less.low > 0 else "lower" if less.high < 0 else "inconclusive"


def compared(found: Mapping[str, Sequence[float]], *controls: str) -> list[list[Any]]:
    """Returns names with their means, and the paired difference from each control and its verdict.

    The first values of two names are paired if one has more than the other, as in a study that
    was interrupted; dashes stand for a control that has none.
    """
    rows = []
    for name, values in found.items():
        row: list[Any] = [name, estimate(values)]
        for control in controls:
            both = [*zip(values, found.get(control, ()), strict=False)]
            less = differences(*zip(*both, strict=True)) if both else "–"
            judged = verdict(less) if isinstance(less, Estimate) else "–"
            row += [less, "control" if name == control else judged]
        rows.append(row)
    return rows


def shown(value: object) -> str:
    """Returns a value as tables have it, an estimate with its interval."""
    return value.show(".3f") if isinstance(value, Estimate) else str(value)


def options(description: str | None, output: str | None) -> argparse.ArgumentParser:
    """Returns a parser, with the option of all studies that write into a folder."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if output is not None:
        parser.add_argument("--output", type=Path, default=output, help="folder for everything")
    return parser


def train(base: str | dict[str, Any], output: Path, settings: dict[str, Any]) -> Path:
    """Trains a run, unless it is finished, and returns its folder.

    Args:
        base: the name of a configuration in `configs/train`, or a whole one.
        output: folder of the run; an unfinished run there is resumed.
        settings: values that replace those of the configuration, by dotted key.
    """
    if (output / "train.yaml").exists() and not (output / "model.safetensors").exists():
        longrnn.train(resume=output)
    elif not output.exists():
        given = {**settings, "output_dir": str(output)}
        longrnn.train(base, *(f"{key}={json.dumps(value)}" for key, value in given.items()))
    return output


def cosine(highest: float, steps: int) -> list[float]:
    """Returns the learning rate of each step: warm-up in the first twentieth, then a cosine."""
    warmup = steps // 20
    return [
        highest * step / warmup
        if step < warmup
        else highest * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        for step in range(steps)
    ]


def fit(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    rates: Iterable[float],
    *,
    weight_decay: float = 0.1,
) -> None:
    """Trains a model that `longrnn.train` does not know: AdamW, clipping at 1.

    Args:
        model: what is trained.
        loss: of a step, counted from 0.
        rates: the learning rate of each step; training ends with them.
        weight_decay: of matrices, kernels and embeddings.
    """
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if decays(name, p) is decayed],
            "weight_decay": weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def text_task(files: Sequence[Path]) -> dict[str, Any]:
    """Returns the task of a training configuration that reads books.

    Raises:
        UserError: a file does not exist.
    """
    for file in files:
        if not file.is_file():
            raise UserError(f"there is no text at {file}: save the book there, or name another")
    return {"kind": "text", "data": [str(file) for file in files]}


def stretches(files: Sequence[Path], rows: int, length: int, seed: int) -> Tensor:
    """Returns stretches of books at random places, `(rows, length)` bytes as int64.

    Raises:
        UserError: a text is missing, or all of them together are too short.
    """
    text_task(files)
    content = b"".join(file.read_bytes() for file in files)
    if len(content) < length:
        raise UserError(
            f"the books have {len(content):,} bytes, a row {length:,}: give longer ones"
        )
    every = torch.frombuffer(bytearray(content), dtype=torch.uint8).unfold(0, length, 1)
    places = torch.randint(len(every), (rows,), generator=torch.Generator().manual_seed(seed))
    return every[places].long()


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


def growth(curve: Tensor, trained: int) -> float:
    """Returns the largest loss beyond the training length, relative to the largest inside.

    Args:
        curve: `(length,)` losses by position.
        trained: the training length; losses are means over an eighth of it, so that one token is
            not a maximum.
    """
    width = max(1, trained // 8)
    means = torch.stack([piece.mean() for piece in curve.split(width)])
    inside = trained // width
    return float(means[inside:].max() / means[:inside].max())


@torch.no_grad()
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


@torch.no_grad()
def recalled(model: Any, batch: Batch, rows: int) -> float:
    """Returns the share of prompts whose whole answer is predicted, of so many rows at a time."""
    targets = batch.targets.where(batch.answers(), UNSCORED)
    return float(right(model, batch.tokens, targets, rows).all(1).double().mean())


def tally(verdicts: Sequence[str]) -> str:
    """Returns how often there is each verdict."""
    return ", ".join(f"{verdicts.count(each)} {each}" for each in dict.fromkeys(verdicts))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(shown, line))} |" for line in lines)


def record(output: Path, title: str, *blocks: str) -> None:
    """Prints and writes `report.md`: title, date, machine, command, and the blocks."""
    line = shlex.join(["python", *sys.argv])
    where = f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, torch {torch.__version__}"
    text = "\n\n".join([f"# {title}", f"{where}.", f"```\n{line}\n```", *blocks])
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.md").write_text(f"{text}\n")
    print(text)


def run(main: Callable[[], None]) -> None:
    """Runs a study; an error ends it with one sentence, bad input with exit code 2."""
    run_to_end(main, again=lambda: shlex.join(["python", *sys.argv]))
