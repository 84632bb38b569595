"""The demo: state collapse and its cures, and passkeys far beyond the training length.

    python scripts/demo.py
    python scripts/demo.py --lengths 256,4k,64k --n 5 --output demo

First the loss by position of a language model that collapses, as it is and under three mitigations;
then its repair by `longrnn repair`, in weights that transformers runs without longrnn; then
passkeys with a model that forgets, the same model repaired, and one that holds; and then both the
loss and the keys of a model that loses both, under one mitigation for all heads and under one per
head. Writes the results and pictures. A demo that was stopped continues with the same command.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer

from longrnn import LanguageModel, load_tokenizer, mitigation, repair
from longrnn.bundled import bundled
from longrnn.cli.command import invoke
from longrnn.data.prompts import FILLER
from longrnn.diagnostics.calibrate import calibrate
from longrnn.diagnostics.job import Job
from longrnn.evaluation.options import PasskeyOptions, PerplexityOptions
from longrnn.evaluation.run import Outcome, run_and_report
from longrnn.evaluation.texts import read_documents
from longrnn.files import write_atomic
from longrnn.hf.convert import convert
from longrnn.hf.load import load_editable
from longrnn.hf.names import embedded
from longrnn.hf.opened import OpenCheckpoint, open_checkpoint
from longrnn.programs import run_to_end
from longrnn.units import format_length, parse_length, parse_lengths

COLLAPSING, ROW = "collapse-tiny", 64  # and the tokens of a row of its training
CURES = {
    "sliding_window": {"kind": "sliding_window", "window": ROW},
    "forget_more": {"kind": "forget_more", "decay_scale": 0.98, "input_scale": 1.0},
}
# Tokens over which a speed is measured.
TIMED = 4096
BROKEN, HOLDING = "passkey-tiny-short", "passkey-tiny"
REPAIRED = f"{BROKEN} + token_filter"
TRAINED = 256
BOTH, BOTH_ROW = "recall-collapse", 384


def demo(
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = "256,1k,4k,16k,64k",
    n: Annotated[int, typer.Option("--n", help="Prompts per cell.")] = 10,
    window: Annotated[str, typer.Option(help="Tokens of a text whose loss is measured.")] = "16k",
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("demo"),
) -> None:
    """Shows state collapse and its cures, and passkeys under a model that holds."""
    asked, width = parse_lengths(lengths), parse_length(window)  # refused before anything runs
    collapse(width, output)
    repaired_weights(min(width, 8192), output / "repair")
    passkeys(asked, n, output)
    loss_and_keys(asked[-1], n, output / "both")


def collapse(length: int, output: Path) -> None:
    """Loss by position of a model that collapses: plain, and under three mitigations."""
    plain, tokenizer = load_editable(COLLAPSING), load_tokenizer(COLLAPSING)
    texts = bundled("eval/data")
    other = read_documents([texts / "tom_sawyer_excerpt.txt"], tokenizer, plain)
    calibrated = calibrate(Job(plain, other, ROW, quiet=True), "state_norm")
    models: dict[str, LanguageModel] = {"plain": plain}
    for name, options in (CURES | {"state_norm": calibrated}).items():
        models[name] = plain.under(mitigation(options))
    loss = PerplexityOptions(texts=[texts / "moby_dick_excerpt.txt"], lengths=[length]).evaluation()
    opened = [OpenCheckpoint(name, model, tokenizer) for name, model in models.items()]
    (outcome,), (_, report, *_) = run_and_report(opened, [loss], output / "loss")
    inside, beyond = print_losses(outcome, {name: speed(models[name]) for name in models})
    worst = max(beyond[name] / inside[name] for name in models if name != "plain")
    typer.echo(
        f"{report}\n"
        f"{COLLAPSING}, trained on rows of {ROW} bytes, collapses on a novel that it never saw: "
        f"its loss is {inside['plain']:.2f} nats per byte at the end of its training length and "
        f"{beyond['plain']:.2f} at {format_length(length)} bytes. The same weights under a "
        f"mitigation, without training, stay within {worst:.2f} times the loss inside.\n"
    )


def repaired_weights(length: int, output: Path) -> None:
    """Repairs the model that collapses, and computes the result with transformers alone."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    texts = bundled("eval/data")
    choose, prove = (texts / f"{name}_excerpt.txt" for name in ("tom_sawyer", "moby_dick"))
    done = repair(COLLAPSING, [choose, prove], output, length=length, folds_only=True)
    typer.echo("\n".join([*done.sentences, str(done.report)]))
    if done.checkpoint is None:
        return
    folder = output / "transformers"
    if not folder.exists():
        convert(done.checkpoint, folder, to="hf")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    stock, tokens = AutoModelForCausalLM.from_pretrained(folder), TIMED // 2
    ids = torch.tensor([list(prove.read_bytes()[: tokens + 1])])
    with torch.no_grad():
        nats = torch.nn.functional.cross_entropy(stock(ids[:, :-1]).logits[0], ids[0, 1:])
    typer.echo(
        f"transformers' own {type(stock).__name__} opens {folder}, which longrnn converted, and "
        f"has {nats / math.log(2):.2f} bits per byte on {format_length(tokens)} bytes of it.\n"
    )


def by_position(outcome: Outcome) -> dict[str, dict[int, float]]:
    """Returns nats per byte between a power of 2 and the one before it, by model and power."""
    found: dict[str, dict[int, float]] = {}
    for cell in outcome.table.cells:
        if cell.metric.endswith("by position") and cell.at and cell.estimate:
            found.setdefault(cell.model, {})[cell.at] = cell.estimate.mean * math.log(2)
    return found


def print_losses(
    outcome: Outcome, speeds: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Prints the losses; returns those at the end of the training length, and the last ones."""
    found = by_position(outcome)
    stops = list(found["plain"])
    shown = [stop for stop in stops if stop in (ROW, 512, 4096) or stop > ROW * 64]
    name_width = 16
    typer.echo("".join(f"{title:>{name_width}}" for title in ("nats per byte at", *found)))
    for stop in shown:
        start = stops[stops.index(stop) - 1]
        cells = [f"{format_length(start)} to {format_length(stop)}"]
        cells += [f"{one[stop]:.2f}" for one in found.values()]
        typer.echo("".join(f"{cell:>{name_width}}" for cell in cells))
    cells = ["tokens/s", *(f"{speeds[name]:,.0f}" for name in found)]
    typer.echo("".join(f"{cell:>{name_width}}" for cell in cells))
    inside = {name: one[ROW] for name, one in found.items()}
    return inside, {name: one[stops[-1]] for name, one in found.items()}


def speed(model: LanguageModel) -> float:
    """Tokens per second of a prefill, the better of two."""
    tokens = torch.randint(256, (1, TIMED), generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        with torch.no_grad():
            model(tokens, keep=0)
        seconds.append(time.perf_counter() - begun)
    return TIMED / min(seconds)


def passkeys(asked: list[int], n: int, output: Path) -> None:
    """Keys recalled by a model that forgets, the same repaired, and one that holds."""
    first, last = asked[0], asked[-1]
    broken, tokenizer = load_editable(BROKEN), load_tokenizer(BROKEN)

    # The filler alone, without a key, says which heads remember and which tokens they ignore.
    write_atomic(output / "filler.txt", FILLER * 400)
    documents = read_documents([output / "filler.txt"], tokenizer, broken)
    target = max(last, 2 * TRAINED)
    found = calibrate(Job(broken, documents, TRAINED, target, quiet=True), "token_filter")
    models = [
        OpenCheckpoint(BROKEN, broken, tokenizer),
        OpenCheckpoint(REPAIRED, broken.under(mitigation(found)), tokenizer),
        open_checkpoint(HOLDING),
    ]
    prompts = PasskeyOptions(lengths=asked, n=n).evaluation()
    (outcome,), (_, report, *_) = run_and_report(models, [prompts], output)
    outcome.table.show()
    recalled = shares(outcome)

    def share(name: str, length: int) -> str:
        return f"{recalled[name, length]:.0%} of the keys at {format_length(length)} tokens"

    typer.echo(
        f"{report}\n"
        f"{BROKEN}, trained on prompts of {TRAINED} tokens, recalls {share(BROKEN, first)} and "
        f"{share(BROKEN, last)}; with the filler's tokens kept out of the heads that remember, "
        f"and no training, it recalls {share(REPAIRED, last)}.\n"
        f"{HOLDING}, the same network trained on segments that are repeated thousands of times, "
        f"recalls {share(HOLDING, first)} and {share(HOLDING, last)}."
    )


def shares(outcome: Outcome) -> dict[tuple[str, int | None], float]:
    """Returns the share of keys recalled, by model and length."""
    drawn = [
        cell for cell in outcome.table.cells if cell.column.drawn and cell.estimate is not None
    ]
    return {(cell.model, cell.at): cell.estimate.mean for cell in drawn if cell.estimate}


def loss_and_keys(length: int, n: int, output: Path) -> None:
    """Loss and keys of a model that loses both: plain, and repaired for all heads or per head."""
    plain, tokenizer = load_editable(BOTH), load_tokenizer(BOTH)
    novel = bundled("eval/data") / "moby_dick_excerpt.txt"
    repairs = {
        "plain": "none",
        "uniform": f"sliding_window(window={BOTH_ROW})",
        "per head": str(embedded()[BOTH] / "per_head.yaml"),
    }
    models = [
        OpenCheckpoint(name, plain.under(mitigation(repair)), tokenizer)
        for name, repair in repairs.items()
    ]
    depths = [0.1, 0.3, 0.5, 0.7, 0.9]
    loss = PerplexityOptions(texts=[novel], lengths=[length]).evaluation()
    prompts = PasskeyOptions(
        lengths=[length], n=max(1, n // 5), depths=depths, filler=novel
    ).evaluation()
    (losses, recalls), (_, report, *_) = run_and_report(models, [loss, prompts], output)
    recalled = {model: share for (model, _), share in shares(recalls).items()}
    typer.echo(f"\n{f'{BOTH}, at {format_length(length)}':>30}{'nats per byte':>16}{'keys':>8}")
    nats = {name: found[length] for name, found in by_position(losses).items()}
    for name, value in nats.items():
        typer.echo(f"{name:>30}{value:>16.2f}{recalled[name]:>8.0%}")
    typer.echo(
        f"{report}\n"
        f"{BOTH}, trained on rows of {BOTH_ROW} bytes, loses both there. Without training, a "
        f"window on all heads brings the loss to {nats['uniform']:.2f} and recalls "
        f"{recalled['uniform']:.0%} of the keys; a choice per head, made by `longrnn calibrate` "
        f"on another novel, brings it to {nats['per head']:.2f} and recalls "
        f"{recalled['per head']:.0%}."
    )


if __name__ == "__main__":
    demo.__doc__ = __doc__
    app = typer.Typer()
    app.command()(demo)
    again = shlex.join(["python", *sys.argv])
    run_to_end(lambda: invoke(app, sys.argv[1:]), again=lambda: again)
