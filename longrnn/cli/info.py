"""`longrnn info`."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longrnn.cli.command import Argument
from longrnn.cli.verify import print_verified
from longrnn.options import Options

if TYPE_CHECKING:
    from longrnn.hf.foreign import ForeignLM
    from longrnn.models import RecurrentLM


class Subject(Options):
    """What is described."""

    checkpoint: Annotated[str, Argument("CHECKPOINT")]
    """Name of an embedded checkpoint, a folder, or organisation/model on the Hub; or the folder of
    a corpus."""
    verify: bool = False
    """Instead, compare files with their checksums: a checkpoint, run, corpus, state or results
    file, or a download from the Hub."""


def info(subject: Subject) -> None:
    """Describe a checkpoint or a corpus: its sizes, the bytes of a state, the lengths of documents.

    Example: longrnn info passkey-tiny
    """
    checkpoint = subject.checkpoint
    if subject.verify:
        print_verified(checkpoint)
        return
    from longrnn.data.stream import HEADER

    is_corpus = (Path(checkpoint) / HEADER).is_file()
    for name, value in (_corpus(checkpoint) if is_corpus else _model(checkpoint)).items():
        typer.echo(f"{name:<12}{value}")


def _corpus(folder: str) -> dict[str, str]:
    import numpy as np

    from longrnn.data.stream import Corpus

    found = Corpus(Path(folder))
    header, lengths = found.header, sorted((found.spans[:, 1] - found.spans[:, 0]).tolist())
    rows = {
        "tokenizer": f"{header.tokenizer} ({header.fingerprint}, {header.vocab_size:,} ids)",
        "documents": f"{header.documents:,}",
        "tokens": f"{header.tokens:,} ({np.dtype(header.dtype).name})",
        "lengths": f"{lengths[0]:,} to {lengths[-1]:,}, median {median(lengths):,.0f}",
        "dropped": f"{header.dropped_documents:,} documents",
        "checksums": "right",
    }
    if header.scored_tokens is not None:
        share = header.scored_tokens / header.tokens
        rows["answers"] = f"{header.scored_tokens:,} tokens ({share:.1%})"
    return rows


def _model(checkpoint: str) -> dict[str, str]:
    from longrnn.hf.load import load
    from longrnn.hf.names import resolve, split_spec

    model = load(checkpoint)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "checkpoint": str(resolve(split_spec(checkpoint)[0])),
        "parameters": f"{parameters:,} ({next(model.parameters()).dtype})",
        **_description(model),
        "fingerprint": model.fingerprint(),
    }


def _description(model: Any) -> dict[str, str]:
    from longrnn.models import RecurrentLM

    found = _recurrent(model) if isinstance(model, RecurrentLM) else _hugging_face(model)
    mitigation = model.mitigation
    return found if mitigation is None else {**found, "mitigation": str(mitigation)}


def _recurrent(model: RecurrentLM) -> dict[str, str]:
    from longrnn import state

    config, cell = model.config, model.cells[0]
    return {
        "layers": f"{config.n_layers} × {config.mixer['kind']}, {config.block} blocks",
        "d_model": str(config.d_model),
        "mixer": cell.extra_repr(),
        "position": config.position["kind"],
        "vocabulary": f"{config.vocab_size:,} ({'tied' if config.tie_embeddings else 'own'} head)",
        "state": f"{state.nbytes(model.init_state(1)):,} bytes per sequence, at any length",
    }


def _hugging_face(model: ForeignLM) -> dict[str, str]:
    import torch

    from longrnn import state

    config = model.config
    limit = "no limit" if model.max_length is None else f"at most {model.max_length:,} tokens"
    if model.max_length is not None and model.can_go_beyond:
        limit += " (CHECKPOINT+beyond lifts this)"
    one, two = (
        state.nbytes(model(torch.zeros(1, size, dtype=torch.long), keep=0).state) for size in (1, 2)
    )
    grows = f", and {two - one:,} more for each further token" if two > one else ", at any length"
    layers = f"{config.num_hidden_layers} × {model.kind}, run by transformers"
    if model.cells:
        layers += f"; {len(model.cells)} × {model.cells[0].kind} of them by longrnn"
    return {
        "layers": layers,
        "d_model": str(config.hidden_size),
        "length": limit,
        "processed": "in pieces" if model.tokens_together else "one token at a time",
        "vocabulary": f"{model.vocab_size:,} ({'tied' if model.tied else 'own'} head)",
        "state": f"{one:,} bytes per sequence after one token{grows}",
    }
