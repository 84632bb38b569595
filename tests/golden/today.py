"""What the golden tests know about today's code, in one place.

A rewrite that names things otherwise (the tensors of a state, the parameters of a model, a
checkpoint folder, the keys of a configuration, the files of an evaluation) changes a function here,
and no recorded number.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from longrnn import LanguageModel, RecurrentConfig, RecurrentLM
from longrnn.cells import EditedState
from longrnn.state import LMState

# Implementations of Mamba-2's recurrence on a CPU, as `load` and the cell's option take them.
BACKENDS = ("cpu", "torch")


def cell_states(model: LanguageModel, state: LMState) -> dict[str, Tensor]:
    """The state of every layer's cell by name, without the inputs that a window remembers.

    Mamba-2 has `conv`, the last inputs of the convolution, and `ssm`, `(b, h, p, n)`; an LSTM `h`
    and `c`; a GRU and an RNN `h`. Under a mitigation they hold the edited recurrence's state after
    the last token: with a window, the sum over the tokens inside it.
    """
    found = {}
    memories = model.memories(state)
    for layer, (own, memory) in enumerate(zip(model.cell_states(state), memories, strict=True)):
        plain = own.state if isinstance(own, EditedState) else own
        for name, tensor in plain._asdict().items():
            found[f"{layer}.{name}"] = memory if name == "ssm" else tensor
    return found


def parameter_key(name: str) -> str:
    """The name of a parameter without those of the modules around it: `0.in_proj.weight`."""
    return ".".join(part for part in name.split(".") if part not in ("blocks", "mixer", "cell"))


def gradient_key(model: LanguageModel, name: str) -> str:
    """The name of a parameter's gradient; with `model.` in front under a mitigation."""
    return f"{'' if model.mitigation is None else 'model.'}{parameter_key(name)}"


def model_options(cell: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """The configuration of a model of two layers, 8 wide."""
    return {"vocab_size": 11, "d_model": 8, "n_layers": 2, "mixer": dict(cell), **options}


def new_model(cell: Mapping[str, Any], **options: Any) -> RecurrentLM:
    """A model of two layers, 8 wide."""
    return RecurrentLM(RecurrentConfig(**model_options(cell, **options)))


def save(model: RecurrentLM, folder: Path) -> None:
    """Writes a checkpoint folder of a model that reads bytes."""
    from longrnn.models.checkpoint import save_model

    save_model(model, folder)


def command(*arguments: str | Path) -> None:
    """Runs `longrnn …` in this process, without its output."""
    from longrnn.cli import main

    before, sys.argv = sys.argv, ["longrnn", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as leaving:
        if leaving.code:
            raise RuntimeError(err.getvalue()) from leaving
    finally:
        sys.argv = before


def text_task(files: Sequence[Path]) -> dict[str, Any]:
    """Keys of a training configuration: rows of up to 40 bytes of text files."""
    return {
        "task": {"kind": "text", "data": [str(file) for file in files]},
        "length": {"max": 40},
    }


def train(folder: Path, **config: Any) -> list[float]:
    """The loss of each of 20 steps of `longrnn train`."""
    values = {
        "output_dir": str(folder / "run"),
        "max_steps": 20,
        "warmup_steps": 4,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "adam_epsilon": 1e-3,  # with a tiny one, Adam turns rounding near 0 into steps
        **config,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    command("train", folder / "config.yaml", "--quiet")
    return [row["loss"] for row in rows(folder / "run/metrics.jsonl") if "loss" in row]


def passkey_rows(folder: Path) -> list[tuple[Any, ...]]:
    """Length, depth, key and answer of every prompt that `eval passkey` has evaluated."""
    found = [{**row["item"], **row["result"]} for row in rows(folder / "rows.jsonl")]
    return sorted((row["length"], row["depth"], row["key"], row["said"]) for row in found)


def perplexity_rows(folder: Path) -> dict[int, list[float]]:
    """The loss per token of the windows that `eval perplexity` has evaluated, by their start.

    First that of all tokens, then those from each power of two to the next.
    """
    found = {}
    for row in rows(folder / "rows.jsonl"):
        length, nats = row["item"]["length"], row["result"]["nats"]
        # A row has sums from each of these positions to the next.
        edges = [0, 1, 2, 4, 8, 16, 32, *range(64, length, 64), length]
        powers = [0, *(edge for edge in edges if edge & (edge - 1) == 0 and edge)]
        losses = [
            sum(nats[edges.index(start) : edges.index(stop)]) / (stop - start)
            for start, stop in pairwise(powers)
        ]
        found[row["item"]["start"]] = [sum(nats) / length, *losses]
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
