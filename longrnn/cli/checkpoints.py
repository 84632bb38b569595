"""`longrnn info` and `longrnn convert`."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from longrnn.cli.command import Argument
from longrnn.errors import UserError
from longrnn.options import Options


class InfoOptions(Options):
    """What is described."""

    checkpoint: Annotated[str, Argument("CHECKPOINT")]
    """Name of an embedded checkpoint, a folder (also of a corpus), or organisation/model."""


def info(options: InfoOptions) -> None:
    """Describe a checkpoint or a corpus: its sizes, the bytes of a state, the lengths of documents.

    The files that are read are compared with their checksums.

    Example: longrnn info passkey-tiny
    """
    for name, value in (_corpus(options.checkpoint) or _model(options.checkpoint)).items():
        if value:
            typer.echo(f"{name:<18} {value:,}" if isinstance(value, int) else f"{name:<18} {value}")


def _corpus(folder: str) -> dict[str, Any]:
    """Return what describes a corpus; nothing if there is none in this folder."""
    if not os.path.isdir(folder):  # such as the name of an embedded checkpoint
        return {}
    from longrnn.data.stream import HEADER, Corpus

    if not (Path(folder) / HEADER).is_file():
        return {}
    corpus = Corpus(Path(folder))
    lengths = sorted((corpus.spans[:, 1] - corpus.spans[:, 0]).tolist())
    return {
        **{name: value for name, value in asdict(corpus.header).items() if name != "sources"},
        "lengths": f"{lengths[0]:,} to {lengths[-1]:,}, median {median(lengths):,.0f}",
    }


def _model(checkpoint: str) -> dict[str, Any]:
    import torch

    from longrnn import state
    from longrnn.hf.load import load
    from longrnn.hf.names import resolve, split_spec
    from longrnn.models import RecurrentLM

    model: Any = load(checkpoint)
    config, limit, cells = model.config, model.max_length, model.cells
    if isinstance(model, RecurrentLM):
        position = config.position["kind"]
        layers = f"{config.n_layers} {config.block} blocks, d_model {config.d_model}, {position=!s}"
    else:
        layers = f"{config.num_hidden_layers} of {model.kind}, d_model {config.hidden_size}"
    with torch.no_grad():
        states = [model(torch.zeros(1, n, dtype=torch.long), keep=0).state for n in (1, 2)]
    first, second = map(state.nbytes, states)
    grows = f" after one token, and {second - first:,} more for each further token"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    lifted = " (CHECKPOINT+beyond lifts this)" if getattr(model, "can_go_beyond", False) else ""
    return {
        "checkpoint": resolve(split_spec(checkpoint)[0]),
        "parameters": f"{parameters:,} ({next(model.parameters()).dtype})",
        "layers": layers,
        "cells": cells and f"{len(cells)} × {cells[0].kind}, {cells[0].extra_repr()}",
        "length": limit and f"at most {limit:,} tokens{lifted}",
        "vocabulary": f"{model.vocab_size:,}",
        "state": f"{first:,} bytes per sequence{grows if second > first else ', at any length'}",
        "mitigation": model.mitigation,
        "fingerprint": model.fingerprint(),
    }


class Conversion(Options):
    """What is written in which layout."""

    source: Annotated[str, Argument("SOURCE")]
    """A checkpoint in any of the layouts, or a hybrid; CHECKPOINT+MITIGATION folds what can be
    folded. With --from, a file of weights, or a folder with manifest.json."""
    destination: Annotated[Path, Argument("DESTINATION")]
    """A new folder; the tokenizer is copied too."""
    to: str
    """Layout to write: ours, native (mamba-ssm), or hf (transformers)."""
    from_: str | None = None
    """Library whose RNN, GRU or LSTM is read: torch or tensorflow."""
    names: str | None = None
    """With --from: YAML file that says which tensor is what, or the name of a bundled one."""


def convert(conversion: Conversion) -> None:
    """Write a Mamba-1 or 2 checkpoint in another layout; the weights stay bit for bit the same.

    scale_decay, power_decay and time_scales are folded into the weights, those of a hybrid too; a
    mitigation that cannot be folded is recorded in our layout. An adapter (LoRA) is merged. With
    --from, an RNN, GRU or LSTM of another library becomes a checkpoint of longrnn.

    Example: longrnn convert passkey-tiny passkey-tiny-hf --to hf
    """
    source, destination = conversion.source, conversion.destination
    if conversion.from_ is None:
        from longrnn.hf.convert import convert as write

        if conversion.names is not None:
            raise UserError("--names belongs to --from: give --from torch or --from tensorflow")
        write(source, destination, to=conversion.to)
    else:
        from longrnn.hf.rnn_weights import convert_rnn

        if conversion.to != "ours":
            raise UserError(f"--to {conversion.to} does not support these models: give --to ours")
        convert_rnn(Path(source), destination, library=conversion.from_, names=conversion.names)
    typer.echo(str(conversion.destination))
