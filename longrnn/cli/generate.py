"""`longrnn generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.options import Checkpoint, Device, Mitigation, pick_device
from longrnn.errors import UserError

# Words behind the checkpoint are refused with the option that they need.
SETTINGS = {"allow_extra_args": True}


def generate(
    context: typer.Context,
    checkpoint: Checkpoint,
    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file with the text to continue.")
    ] = None,
    max_new_tokens: Annotated[
        str, typer.Option(help="Maximum number of tokens to generate.")
    ] = "100",
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 takes the most likely token.")
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(help="Sample only from the most likely tokens whose probabilities sum to p."),
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop after this text; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the sampling.")] = 0,
    mitigation: Mitigation = None,
    device: Device = "auto",
) -> None:
    """Continue a text.

    Example: longrnn generate passkey-tiny --prompt "The grass is green. The sky" --stop .
    """
    import torch

    from longrnn.hf.opened import open_checkpoint
    from longrnn.inference.engine import refuse_long
    from longrnn.models.generate import stream
    from longrnn.seeds import seeded
    from longrnn.text import check_text, read_text
    from longrnn.units import parse_length

    if context.args:
        raise UserError(f"{context.args[0]!r} has no option before it: give a text with --prompt")
    if (prompt is None) == (prompt_file is None):
        raise UserError("give either --prompt or --prompt-file")
    if prompt_file is not None:
        prompt, _ = read_text(prompt_file)
    check_text("--prompt", prompt or "", remedy="give it in a file, with --prompt-file")
    for text in stop or []:
        check_text("--stop", text, remedy="give text in UTF-8")
    most = parse_length(max_new_tokens)
    target = pick_device(device)
    opened = open_checkpoint(checkpoint, mitigation, device=target)
    model, tokenizer = opened.model, opened.tokenizer
    ids = torch.tensor([tokenizer.encode(prompt or "")], dtype=torch.long, device=target)
    refuse_long(model, ids.shape[1] + most)
    shown = ""
    for (generated,) in stream(
        model,
        ids,
        max_new_tokens=most,
        temperature=temperature,
        top_p=top_p,
        stop=[tokenizer.encode(text) for text in stop or []],
        generator=seeded(seed, target),
    ):
        text = tokenizer.decode(generated)
        if not text.endswith("\ufffd"):  # the last character is still incomplete
            typer.echo(text[len(shown) :], nl=False)
            shown = text
    typer.echo()
