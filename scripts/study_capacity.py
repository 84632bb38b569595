"""Train a family of small models, and relate state size to forgetting and recall.

    python scripts/study_capacity.py
    python scripts/study_capacity.py --d-states 8,16,32,64 --train-lengths 256,512,1k --steps 3000

Every state size is trained on passkeys (`configs/train/capacity.yaml`) at the shortest length, and
continues from there at the next longer one, with the same number of tokens per step. Each model is
then evaluated on passkeys beyond its training length, and on a long filler text for its loss by
position; `longrnn diagnose capacity` combines the two. The same command resumes an
interrupted study.

Trained from scratch at each length, models this small do not learn reliably: longer rows mean fewer
rows per step, and so fewer answers per step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn import load, load_tokenizer
from longrnn.config import load_config
from longrnn.errors import UserError
from longrnn.evaluation import passkey, perplexity
from longrnn.evaluation.passkey_grid import Grid
from longrnn.evaluation.texts import read_documents
from longrnn.files import write_atomic
from longrnn.hf.opened import OpenCheckpoint
from longrnn.programs import run_script
from longrnn.studies.capacity_report import report
from longrnn.tasks.passkey_prompts import FILLER, HEADER
from longrnn.training.config import TrainConfig
from longrnn.training.trainer import Trainer
from longrnn.units import parse_length, parse_lengths

CONFIG = Path(__file__).parents[1] / "configs/train/capacity.yaml"
LENGTHS = "256,384,512,768,1k,1536,2k,3k,4k,6k,8k,12k,16k,24k,32k"
# Tokens per optimizer step, at every training length.
STEP_TOKENS = 4096


def main(
    d_states: Annotated[str, typer.Option(help="State sizes, as mixer.d_state.")] = "4,8,16,32",
    train_lengths: Annotated[str, typer.Option(help="Training lengths.")] = "192,384,768,1536",
    steps: Annotated[int, typer.Option(help="Training steps at the shortest length.")] = 1500,
    more_steps: Annotated[int, typer.Option(help="Training steps at each longer length.")] = 400,
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = LENGTHS,
    n: Annotated[
        int, typer.Option("--n", help="Prompts for each length and each of three depths.")
    ] = 20,
    text_length: Annotated[str, typer.Option(help="Length of the filler text in tokens.")] = "32k",
    output: Annotated[Path, typer.Option(help="Folder for runs and results.")] = Path(
        "runs/capacity"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Trains and evaluates the family, and fits its capacity."""
    prompt_lengths, reach = parse_lengths(lengths), parse_length(text_length)
    sizes, trainings = parse_lengths(d_states), parse_lengths(train_lengths)
    if min(steps, more_steps, n) < 1:
        raise UserError("steps, more-steps and n must be at least 1: give larger numbers")
    # The loss is measured on the filler of training, without a key.
    text = output / "filler.txt"
    write_atomic(text, HEADER + (FILLER * (reach // len(FILLER) + 2))[: reach + 1])
    family = []
    for d_state in sizes:
        before: Path | None = None
        for trained in sorted(trainings):
            run = output / f"state{d_state}-length{trained}"
            settings = {
                "output_dir": run,
                "model.mixer.d_state": d_state,
                "length.max": trained,
                "per_device_train_batch_size": max(1, STEP_TOKENS // trained),
                "max_steps": steps if before is None else more_steps,
                "warmup_steps": min(100, steps if before is None else more_steps),
            } | ({} if before is None else {"init_from": before})
            overrides = [f"{key}={value}" for key, value in settings.items()]
            Trainer(load_config(TrainConfig, CONFIG, overrides), resume=True, quiet=quiet).train()
            measure(run, prompt_lengths, n, text, reach, output / "results" / run.name, quiet)
            family.append(str(run))
            before = run
    folder = output / "capacity"
    typer.echo("\n".join(map(str, report(family, [output / "results"], folder))))


def measure(
    run: Path, lengths: list[int], n: int, text: Path, reach: int, results: Path, quiet: bool
) -> None:
    """Evaluates passkeys and the loss by position of one model; writes both to a folder."""
    model, tokenizer = load(run), load_tokenizer(run)
    passkey.evaluate(
        [OpenCheckpoint(run.name, model, tokenizer)],
        Grid(lengths, n, passkey.evenly_spaced(3)),
        output=results / "passkey.jsonl",
        quiet=quiet,
    )
    perplexity.evaluate(
        model,
        read_documents([text], tokenizer, model),
        length=reach,
        output=results / "perplexity.jsonl",
        quiet=quiet,
    )


if __name__ == "__main__":
    run_script(main, __doc__)
