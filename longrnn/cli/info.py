"""`longrnn info`."""

from __future__ import annotations

import typer

from longrnn.cli.options import Checkpoint


def info(checkpoint: Checkpoint) -> None:
    """Say what a checkpoint is: sizes, bytes of state, backend.

    Example: longrnn info passkey-tiny
    """
    from longrnn import state
    from longrnn.hf.loading import load, resolve

    model = load(checkpoint)
    config = model.config
    mixer = model.mixers[0]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = {
        "checkpoint": str(resolve(checkpoint)),
        "parameters": f"{parameters:,} ({next(model.parameters()).dtype})",
        "layers": f"{config.n_layers} × {config.mixer['kind']}, {config.block} blocks",
        "d_model": str(config.d_model),
        "mixer": mixer.extra_repr() or "torch.nn kernel",
        "position": config.position["kind"],
        "vocabulary": f"{config.vocab_size:,} ({'tied' if config.tie_embeddings else 'own'} head)",
        "state": f"{state.nbytes(model.init_state(1)):,} bytes a sequence, at any length",
        "fingerprint": model.fingerprint(),
    }
    for name, value in rows.items():
        typer.echo(f"{name:<12}{value}")
