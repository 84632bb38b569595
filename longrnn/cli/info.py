"""`longrnn info`."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from longrnn.cli.command import Argument
from longrnn.options import Options


class Subject(Options):
    """What is described."""

    checkpoint: Annotated[str, Argument("CHECKPOINT")]
    """Name of an embedded checkpoint, a folder, or organisation/model on the Hub; or the folder of
    a corpus."""


def info(subject: Subject) -> None:
    """Describe a checkpoint or a corpus: its sizes, the bytes of a state, the lengths of documents.

    The files that are read are compared with their checksums.

    Example: longrnn info passkey-tiny
    """
    from longrnn.data.stream import HEADER

    is_corpus = (Path(subject.checkpoint) / HEADER).is_file()
    for name, value in (_corpus if is_corpus else _model)(subject.checkpoint).items():
        typer.echo(f"{name:<12}{value}")


def _corpus(folder: str) -> dict[str, str]:
    import numpy as np

    from longrnn.data.stream import Corpus

    found = Corpus(Path(folder))
    header, lengths = found.header, sorted((found.spans[:, 1] - found.spans[:, 0]).tolist())
    answers = header.scored_tokens
    return {
        "tokenizer": f"{header.tokenizer} ({header.fingerprint}, {header.vocab_size:,} ids)",
        "documents": f"{header.documents:,}",
        "tokens": f"{header.tokens:,} ({np.dtype(header.dtype).name})",
        "lengths": f"{lengths[0]:,} to {lengths[-1]:,}, median {median(lengths):,.0f}",
        "dropped": f"{header.dropped_documents:,} documents",
        "answers": f"{header.tokens if answers is None else answers:,} tokens are scored",
    }


def _model(checkpoint: str) -> dict[str, str]:
    import torch

    from longrnn import state
    from longrnn.hf.load import load
    from longrnn.hf.names import resolve, split_spec
    from longrnn.models import RecurrentLM

    model: Any = load(checkpoint)
    config, limit = model.config, model.max_length
    if is_ours := isinstance(model, RecurrentLM):
        width, tied = config.d_model, config.tie_embeddings
        layers = f"{config.n_layers} × {config.mixer['kind']}, {config.block} blocks"
    else:
        width, tied = config.hidden_size, config.tie_word_embeddings
        layers = f"{config.num_hidden_layers} × {model.kind}, run by transformers"
        if model.cells:
            layers += f"; {len(model.cells)} × {model.cells[0].kind} of them by longrnn"
    one, two = (
        state.nbytes(model(torch.zeros(1, size, dtype=torch.long), keep=0).state) for size in (1, 2)
    )
    grows = f" after one token, and {two - one:,} more for each further token"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    described = {
        "checkpoint": str(resolve(split_spec(checkpoint)[0])),
        "parameters": f"{parameters:,} ({next(model.parameters()).dtype})",
        "layers": layers,
        "d_model": str(width),
        "mixer": model.cells[0].extra_repr() if is_ours else None,
        "position": config.position["kind"] if is_ours else None,
        "length": None if limit is None else f"at most {limit:,} tokens"
        + (" (CHECKPOINT+beyond lifts this)" if getattr(model, "can_go_beyond", False) else ""),
        "vocabulary": f"{model.vocab_size:,} ({'tied' if tied else 'own'} head)",
        "state": f"{one:,} bytes per sequence{grows if two > one else ', at any length'}",
        "mitigation": model.mitigation and str(model.mitigation),
        "fingerprint": model.fingerprint(),
    }  # fmt: skip
    return {name: value for name, value in described.items() if value is not None}
