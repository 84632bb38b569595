"""`longrnn info`, `convert`, `generate` and `data build`: checkpoints, corpora and texts."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from pydantic import Field

from longrnn.cli.command import Argument
from longrnn.cli.options import Model, pick_device
from longrnn.console import printable, say
from longrnn.errors import UserError
from longrnn.imports import IMPORTED
from longrnn.options import Options, Seed, Tokens
from longrnn.text import Documents, Reading, with_bos
from longrnn.units import counted


class InfoOptions(Options):
    """What is described."""

    checkpoint: Annotated[str, Argument("CHECKPOINT")]
    """Name of an embedded checkpoint, a folder (also of a corpus), or organisation/model."""


def info(options: InfoOptions) -> None:
    """Describe a checkpoint or a corpus: its sizes, the bytes of a state, the lengths of documents.

    The files that are read are compared with their checksums. The names that --import registers
    are listed.

    Example: longrnn info passkey-tiny
    """
    for name, value in (_corpus(options.checkpoint) or _model(options.checkpoint)).items():
        if value:
            text = f"{value:,}" if isinstance(value, int) else str(value).replace("\n", " ")
            say(f"{name:<18} {text}")
    for given, registered in IMPORTED.items():
        say(f"{'imported':<18} {given}: {', '.join(registered) or 'registers nothing'}")


def _corpus(folder: str) -> dict[str, Any]:
    """Return what describes a corpus; nothing if there is none in this folder."""
    from longrnn.data.stream import HEADER, Corpus

    if not os.path.isfile(Path(folder) / HEADER):  # `Path.is_file` raises for a long name
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
    from longrnn.checkpoints.load import load
    from longrnn.checkpoints.names import resolve, split_spec
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
    window = getattr(model, "attention_window", None)
    until = "" if window is None else f", up to {window.reach:,} tokens"
    grows = f" after one token, and {second - first:,} more for each further token{until}"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    lifted = " (CHECKPOINT+beyond lifts this)" if getattr(model, "table", "") is None else ""
    return {
        "checkpoint": resolve(split_spec(checkpoint)[0]),
        "parameters": f"{parameters:,} ({next(model.parameters()).dtype})",
        "layers": layers,
        "cells": cells and f"{len(cells)} × {cells[0].kind}, {cells[0].extra_repr()}",
        "length": limit and f"at most {limit:,} tokens{lifted}",
        "vocabulary": f"{model.vocab_size:,}",
        "state": f"{first:,} bytes per sequence{grows if second > first else ', at any length'}",
        "attention": window and f"the last {window.size:,} and the first {window.sinks:,} tokens",
        "mitigation": model.mitigation,
        "fingerprint": model.fingerprint(),
    }


class Conversion(Options):
    """What is written in which layout."""

    source: Annotated[str, Argument("SOURCE")]
    """A checkpoint in any of the layouts, or a hybrid; CHECKPOINT+MITIGATION folds what can be
    folded. With --from, a file of weights."""
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
        from longrnn.checkpoints.convert import convert as write

        if conversion.names is not None:
            raise UserError("--names belongs to --from: give --from torch or --from tensorflow")
        write(source, destination, to=conversion.to)
    else:
        from longrnn.checkpoints.rnn_weights import convert_rnn

        if conversion.to != "ours":
            raise UserError(f"--to {conversion.to} does not support these models: give --to ours")
        convert_rnn(Path(source), destination, library=conversion.from_, names=conversion.names)
    say(conversion.destination)


class Sampling(Options):
    """What is continued, and how."""

    prompt: str | None = None
    """The text to continue."""
    prompt_file: Path | None = None
    """A file with the text to continue."""
    max_new_tokens: Tokens = 100
    """Maximum number of tokens to generate."""
    temperature: float = 0.0
    """Sampling temperature; 0 takes the most likely token."""
    top_p: float = 1.0
    """Sample only from the most likely tokens whose probabilities sum to p."""
    stops: list[str] = Field([])
    """Stop after this text; may be given several times."""
    seed: Seed = 0
    """Random seed of the sampling."""


def generate(model: Model, sampling: Sampling) -> None:
    """Continue a text; the continuation is printed, without the text itself.

    Example: longrnn generate passkey-tiny --prompt "The grass is green. The sky" --stop .
    """
    prompt, file = sampling.prompt, sampling.prompt_file
    if (prompt is None) == (file is None):
        raise UserError("give either --prompt or --prompt-file")
    if "" in sampling.stops:
        raise UserError("--stop is an empty text: leave it out, or give at least one character")

    import torch

    from longrnn.checkpoints.opened import open_checkpoint
    from longrnn.files import read_text
    from longrnn.models.base import refuse_long
    from longrnn.models.generate import ends_of
    from longrnn.models.generate import generate as continue_text
    from longrnn.seeds import seeded

    text = prompt if file is None else read_text(file)[0]
    target = pick_device(model.device)
    opened = open_checkpoint(model.under(model.checkpoint), device=target)
    tokenizer, most = opened.tokenizer, sampling.max_new_tokens
    read = with_bos(tokenizer.encode(text or ""), tokenizer)
    ids = torch.tensor([read], dtype=torch.long, device=target)
    refuse_long(opened.model, ids.shape[1] + most)
    shown, ends = "", ends_of([tokenizer.encode(text) for text in sampling.stops])

    def show(row: int, generated: list[int]) -> bool:
        nonlocal shown
        text = tokenizer.decode(generated)
        if not text.endswith("\ufffd"):  # the last character is still incomplete
            new = text[len(shown) :]
            typer.echo(printable(new) if sys.stdout.isatty() else new, nl=False)
            shown = text
        return ends(row, generated)

    how = sampling.model_dump(include={"max_new_tokens", "temperature", "top_p"})
    generator = seeded(sampling.seed, target)
    continue_text(opened.model, ids, **how, stop=show, generator=generator)
    typer.echo()


class Corpora(Reading):
    """Documents, and how they become a corpus."""

    data: Annotated[list[Documents], Argument("DATA")]
    """UTF-8 text files, tables (.jsonl, .json, .csv, .parquet), folders of them, bundled:moby_dick,
    or names of datasets on the Hugging Face Hub."""
    out: Path
    """Folder to write."""
    tokenizer: str = "bytes"
    """Tokenizer: bytes, a checkpoint, a tokenizer.json, or a folder with that file."""


def build(corpora: Corpora) -> None:
    """Tokenise files or datasets into a corpus, which training maps into memory.

    The same command starts an interrupted build again, and leaves a finished corpus as it is.
    `longrnn info FOLDER` describes a corpus.

    Example: longrnn data build --out data/books --min-length 4k war_and_peace.txt don_quixote.txt
    """
    from longrnn.checkpoints.tokenizer import load_tokenizer
    from longrnn.data.build import build as build_corpus
    from longrnn.data.stream import HEADER

    out, name = corpora.out, corpora.tokenizer
    read, is_built = load_tokenizer(name), (out / HEADER).is_file()
    header = build_corpus(corpora.data, read, out, reading=corpora, name=name)
    made = f"{out} is built already" if is_built else str(out)
    say(f"{made}: {counted(header.documents, 'document')}, {header.tokens:,} tokens")
    if header.dropped_documents:
        dropped = counted(header.dropped_documents, "document")
        say(f"dropped: {dropped}, too short or without an answer")
