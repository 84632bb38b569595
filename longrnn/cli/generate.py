"""`longrnn generate`."""

from __future__ import annotations

from pathlib import Path

import typer
from pydantic import Field

from longrnn.cli.options import Model, pick_device
from longrnn.errors import UserError
from longrnn.options import Options, Seed, Tokens


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
    import torch

    from longrnn.files import read_text
    from longrnn.hf.opened import open_checkpoint
    from longrnn.models.base import refuse_long
    from longrnn.models.generate import ends_of
    from longrnn.models.generate import generate as continue_text
    from longrnn.seeds import seeded

    prompt, file = sampling.prompt, sampling.prompt_file
    if (prompt is None) == (file is None):
        raise UserError("give either --prompt or --prompt-file")
    if "" in sampling.stops:
        raise UserError("--stop is an empty text: leave it out, or give at least one character")
    text = prompt if file is None else read_text(file)[0]
    target = pick_device(model.device)
    opened = open_checkpoint(model.checkpoint, model.mitigation, device=target)
    tokenizer, most = opened.tokenizer, sampling.max_new_tokens
    ids = torch.tensor([tokenizer.encode(text or "")], dtype=torch.long, device=target)
    refuse_long(opened.model, ids.shape[1] + most)
    shown, ends = "", ends_of([tokenizer.encode(text) for text in sampling.stops])

    def show(row: int, generated: list[int]) -> bool:
        nonlocal shown
        text = tokenizer.decode(generated)
        if not text.endswith("\ufffd"):  # the last character is still incomplete
            typer.echo(text[len(shown) :], nl=False)
            shown = text
        return ends(row, generated)

    continue_text(
        opened.model,
        ids,
        max_new_tokens=most,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop=show,
        generator=seeded(sampling.seed, target),
    )
    typer.echo()
