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
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from longrnn import repair
from longrnn.bundled import text_path
from longrnn.checkpoints.convert import convert
from longrnn.checkpoints.names import embedded
from longrnn.checkpoints.opened import open_checkpoint
from longrnn.cli.command import invoke
from longrnn.data.prompts import FILLER
from longrnn.diagnostics.calibrate import calibrate
from longrnn.diagnostics.job import Job
from longrnn.evaluation.options import CostOptions, PasskeyOptions, PerplexityOptions
from longrnn.evaluation.run import run_and_report
from longrnn.files import write_atomic
from longrnn.hf.foreign_load import quietly
from longrnn.programs import run_to_end
from longrnn.reporting.tables import ResultTable
from longrnn.units import format_length, parse_length, parse_lengths

COLLAPSING, ROW = "collapse-tiny", 64  # and the tokens of a row of its training
CHOOSE, PROVE = text_path("bundled:tom_sawyer"), text_path("bundled:moby_dick")
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


def calibrated(job: Job, method: str, file: Path) -> str:
    """Writes the file of a calibrated mitigation, and returns its name."""
    job.write(file, calibrate(job, method))
    return str(file)


def measured(models: list[Any], evaluations: list[Any], folder: Path) -> list[ResultTable]:
    """Measures models, prints the tables and the path of the report, and returns the tables."""
    tables, (_, report, *_) = run_and_report(models, evaluations, folder)
    for table in tables:
        table.show()
    typer.echo(report)
    return tables


def values(table: ResultTable, column: str) -> dict[tuple[str, int | None], float]:
    """Returns the column whose title ends with these words, by model and row."""
    cells = [cell for cell in table.cells if cell.metric.endswith(column)]
    return {(cell.model, cell.at): cell.estimate.mean for cell in cells if cell.estimate}


def collapse(length: int, output: Path) -> None:
    """Loss by position of a model that collapses: plain, and under three mitigations."""
    job = Job.open(COLLAPSING, [CHOOSE], ROW, 0, device=None, quiet=True)
    cures = {
        "plain": None,
        "sliding_window": f"sliding_window(window={ROW})",
        "forget_more": "forget_more(decay_scale=0.98, input_scale=1)",
        "state_norm": calibrated(job, "state_norm", output / "state_norm.yaml"),
    }
    models = [open_checkpoint(COLLAPSING, cure, name=name) for name, cure in cures.items()]
    places = [place for place in (ROW, 512, 4096) if place < length]
    loss = PerplexityOptions(texts=[PROVE], lengths=[*places, length]).evaluation()
    cost = CostOptions(lengths=[TIMED], decode=1).evaluation()
    tables = measured(models, [loss, cost], output / "loss")
    bits = values(tables[0], "by position")
    nats = {key: value * math.log(2) for key, value in bits.items()}
    worst = max(nats[name, length] / nats[name, ROW] for name in cures if name != "plain")
    typer.echo(
        f"{COLLAPSING}, trained on rows of {ROW} bytes, collapses on a novel that it never saw: "
        f"its loss is {nats['plain', ROW]:.2f} nats per byte at the end of its training length and "
        f"{nats['plain', length]:.2f} at {format_length(length)} bytes. The same weights under a "
        f"mitigation, without training, stay within {worst:.2f} times the loss inside.\n"
    )


def repaired_weights(length: int, output: Path) -> None:
    """Repairs the model that collapses, in weights that transformers runs alone."""
    done = repair(COLLAPSING, [CHOOSE, PROVE], output, length=length, folds_only=True)
    typer.echo("\n".join([*done.sentences, str(done.report)]))
    if done.checkpoint is not None:
        typer.echo(in_transformers(str(done.checkpoint), output / "transformers"))


def in_transformers(checkpoint: str, folder: Path) -> str:
    """Converts a checkpoint, and says what transformers computes from it without longrnn."""
    from transformers import AutoModelForCausalLM

    if not folder.exists():
        convert(checkpoint, folder, to="hf")
    with quietly():
        stock, tokens = AutoModelForCausalLM.from_pretrained(folder), TIMED // 2
    ids = torch.tensor([list(PROVE.read_bytes()[: tokens + 1])])
    with torch.no_grad():
        nats = torch.nn.functional.cross_entropy(stock(ids[:, :-1]).logits[0], ids[0, 1:])
    return (
        f"transformers' own {type(stock).__name__} opens {folder}, which longrnn converted, and "
        f"has {nats / math.log(2):.2f} bits per byte on {format_length(tokens)} bytes of it.\n"
    )


def passkeys(asked: list[int], n: int, output: Path) -> None:
    """Keys recalled by a model that forgets, the same repaired, and one that holds."""
    first, last = asked[0], asked[-1]
    # The filler alone, without a key, says which heads remember and which tokens they ignore.
    filler = output / "filler.txt"
    write_atomic(filler, FILLER * 400)
    target = max(last, 2 * TRAINED)
    job = Job.open(BROKEN, [filler], TRAINED, target, device=None, quiet=True)
    repaired = calibrated(job, "token_filter", output / "token_filter.yaml")
    models = [
        open_checkpoint(BROKEN),
        open_checkpoint(BROKEN, repaired, name=REPAIRED),
        open_checkpoint(HOLDING),
    ]
    prompts = PasskeyOptions(lengths=asked, n=n).evaluation()
    (table,) = measured(models, [prompts], output)
    recalled = values(table, "keys recalled")

    def share(name: str, length: int) -> str:
        return f"{recalled[name, length]:.0%} of the keys at {format_length(length)} tokens"

    typer.echo(
        f"{BROKEN}, trained on prompts of {TRAINED} tokens, recalls {share(BROKEN, first)} and "
        f"{share(BROKEN, last)}; with the filler's tokens kept out of the heads that remember, "
        f"and no training, it recalls {share(REPAIRED, last)}.\n"
        f"{HOLDING}, the same network trained on segments that are repeated thousands of times, "
        f"recalls {share(HOLDING, first)} and {share(HOLDING, last)}."
    )


def loss_and_keys(length: int, n: int, output: Path) -> None:
    """Loss and keys of a model that loses both, under one mitigation, one per head, and fitted."""
    folder, fitted = embedded()[BOTH], output / "transformers"
    said = in_transformers(f"{BOTH}+{folder / 'select.yaml'}", fitted)
    models = [
        open_checkpoint(BOTH, name="plain"),
        open_checkpoint(BOTH, f"sliding_window(window={BOTH_ROW})", name="uniform"),
        open_checkpoint(BOTH, str(folder / "per_head.yaml"), name="per head"),
        open_checkpoint(str(fitted), name="fitted weights"),
    ]
    depths = [0.1, 0.3, 0.5, 0.7, 0.9]
    loss = PerplexityOptions(texts=[PROVE], lengths=[length]).evaluation()
    prompts = PasskeyOptions(
        lengths=[length], n=max(1, n // 5), depths=depths, filler=PROVE
    ).evaluation()
    losses, recalls = measured(models, [loss, prompts], output)
    bits, recalled = values(losses, "by position"), values(recalls, "keys recalled")

    def reached(name: str) -> str:
        nats = bits[name, length] * math.log(2)
        return f"{nats:.2f} nats per byte and {recalled[name, length]:.0%} of the keys"

    typer.echo(
        f"{BOTH}, trained on rows of {BOTH_ROW} bytes, loses both there ({reached('plain')}). A "
        f"window on all heads reaches {reached('uniform')}; a choice per head, made by `longrnn "
        f"calibrate` on another novel, {reached('per head')}; and weights that `fit(select=true)` "
        f"fitted on another novel, in an ordinary checkpoint, {reached('fitted weights')}.\n{said}"
    )


if __name__ == "__main__":
    demo.__doc__ = __doc__
    app = typer.Typer()
    app.command()(demo)
    again = shlex.join(["python", *sys.argv])
    run_to_end(lambda: invoke(app, sys.argv[1:]), again=lambda: again)
