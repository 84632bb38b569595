"""Test whether longer training windows help a vanilla RNN as a character language model.

    python -m scripts.study_char_lm data/tinyshakespeare.txt

A vanilla RNN is trained on the head of a text by truncated back-propagation through windows of 16,
32 and 64 characters; a GRU, an LSTM and a Mamba-2 through 64. All carry their state from window to
window. A perceptron that sees the last 8 characters is the baseline without recurrence. All have
the same number of parameters (within TOLERANCE), the same steps, and the same characters per step.
Perplexity is measured on the held-out tail of the text, with Student-t intervals over seeds.
Gradients of the first seed's models explain the result, and the gradient of the recurrent weights
is measured in the middle and at the end of every seed's training. The same command resumes an
interrupted study and skips finished runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from longrnn import LanguageModel, load
from longrnn.config import build_config
from longrnn.data import TASKS
from longrnn.diagnostics.gradients import GradientRecord, Settings, Subject, diagnose
from longrnn.diagnostics.gradients_report import write_report
from longrnn.errors import UserError, nearest
from longrnn.evaluation import perplexity as measure
from longrnn.evaluation.texts import read_documents
from longrnn.files import write_atomic
from longrnn.hf.loading import load_recurrent
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.programs import run_script
from longrnn.text import ByteTokenizer, read_text
from longrnn.training.config import TrainConfig
from longrnn.training.trainer import Trainer
from scripts import char_mlp
from scripts.char_gradients import along_training
from scripts.report_char_lm import (
    MLP,
    SETTINGS,
    STEP_TOKENS,
    WINDOW_TOKENS,
    Setting,
    Study,
    report_lines,
)

# Share of the text that is held out, and largest relative difference in parameters.
HELD_OUT, TOLERANCE = 0.1, 0.02


def main(
    text: Annotated[Path, typer.Argument(help="The text, UTF-8; its tail is held out.")],
    steps: Annotated[int, typer.Option(help="Training steps of each run.")] = 800,
    seeds: Annotated[int, typer.Option(help="Runs for each setting.")] = 3,
    width: Annotated[
        int, typer.Option(help="d_model of the RNN; the others get as many parameters.")
    ] = 256,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="Train only this cell and window, such as rnn-64; may be given several times.",
            show_default="all",
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/char-lm"),
    report: Annotated[Path, typer.Option(help="Report to write.")] = Path(
        "benchmarks/results/char_lm_cpu.md"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Trains and evaluates the models, and writes the report."""
    if min(steps, seeds) < 1 or width < 16:
        raise UserError("steps and seeds must be at least 1 and width at least 16: give larger")
    chosen = choose(setting)
    head, tail = split_text(text, output)
    models = {s.kind: matched(s.kind, width) for s in chosen if s.kind != MLP}
    sizes = {kind: parameters(model) for kind, model in models.items()}
    widths = {kind: int(model["d_model"]) for kind, model in models.items()}
    widths[MLP] = char_mlp.matched(parameters(plain({"kind": "rnn"}, width)))
    sizes[MLP] = char_mlp.parameters(widths[MLP])
    trained: dict[str, list[LanguageModel]] = {one.name: [] for one in chosen}
    losses: dict[str, list[float]] = {one.name: [] for one in chosen}
    for seed in range(seeds):  # seed by seed: a study that is stopped has whole comparisons
        for one in chosen:
            run = output / one.name / f"seed{seed}"
            config = training(one, models.get(one.kind), head, run, seed, steps)
            if one.kind == MLP:
                model: LanguageModel = char_mlp.train(config, widths[MLP])
            else:
                Trainer(config, resume=True, quiet=quiet).train()
                model = load(run)
            trained[one.name].append(model)
            losses[one.name].append(loss_of(model, run, tail, quiet))
    study = Study(
        losses, widths, sizes, {name: found[0] for name, found in trained.items()}, head, tail,
        steps,
    )  # fmt: skip
    lines = report_lines(study, gradients(chosen, output, tail, quiet))
    lines += along_training(chosen, output, tail, seeds, report.with_suffix(".png"))
    write_atomic(report, "\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


def choose(names: list[str] | None) -> list[Setting]:
    """Returns the settings of these names, in the order of SETTINGS.

    Raises:
        UserError: an unknown name, or no recurrent setting.
    """
    known = {one.name: one for one in SETTINGS}
    for name in names or []:
        if name not in known:
            raise UserError(f"unknown setting {name!r}: {nearest(name, known)}")
    chosen = [one for name, one in known.items() if names is None or name in names]
    if all(one.kind == MLP for one in chosen):
        raise UserError(f"{MLP} has no recurrent gradient: add a recurrent --setting")
    return chosen


def split_text(text: Path, output: Path) -> tuple[Path, Path]:
    """Writes head and tail of a text, cut at the beginning of a line, and returns both paths."""
    content, _ = read_text(text)
    cut = content.find("\n", int(len(content) * (1 - HELD_OUT))) + 1
    if cut == 0 or len(content) - cut <= WINDOW_TOKENS:
        raise UserError(
            f"{text} is too short: its last tenth needs more than {WINDOW_TOKENS} characters, "
            "give a longer text"
        )
    head, tail = output / "head.txt", output / "tail.txt"
    if head.is_file() and head.read_bytes() != content[:cut].encode():
        raise UserError(f"{output} holds the study of another text: choose another --output")
    write_atomic(head, content[:cut])
    write_atomic(tail, content[cut:])
    return head, tail


def matched(kind: str, width: int) -> dict[str, Any]:
    """Returns the model of a kind with nearly as many parameters as the RNN of `width`.

    Raises:
        UserError: no size comes within TOLERANCE.
    """
    wanted = parameters(plain({"kind": "rnn"}, width))
    if kind == "mamba2":  # the largest width for a state of 64, and then the state
        below, *_ = around(lambda d: plain(mamba2(64), d), range(16, width + 1, 16), wanted)
        candidates = around(lambda n: plain(mamba2(n), below["d_model"]), range(64, 512, 8), wanted)
    else:
        candidates = around(lambda d: plain({"kind": kind}, d), range(2, width + 1), wanted)
    best = min(candidates, key=lambda model: abs(parameters(model) - wanted))
    if abs(parameters(best) / wanted - 1) > TOLERANCE:
        raise UserError(f"no {kind} has about {wanted:,} parameters: give another --width")
    return best


def around(
    build: Callable[[int], dict[str, Any]], sizes: range, wanted: int
) -> list[dict[str, Any]]:
    """Returns the largest model below `wanted` parameters and the smallest one above."""
    place = bisect_left(sizes, wanted, key=lambda size: parameters(build(size)))
    return [build(size) for size in sizes[max(0, place - 1) : place + 1]]


def mamba2(d_state: int) -> dict[str, Any]:
    return {"kind": "mamba2", "d_state": d_state, "head_dim": 16}


def plain(mixer: dict[str, Any], width: int) -> dict[str, Any]:
    """Returns a model of an embedding, one cell and a head."""
    return {
        "vocab_size": 256,
        "d_model": width,
        "n_layers": 1,
        "mixer": mixer,
        "block": "plain",
        "tie_embeddings": False,
    }


def parameters(model: dict[str, Any]) -> int:
    """Returns the number of parameters, without allocating them."""
    with torch.device("meta"):
        built = RecurrentLM(build_config(RecurrentConfig, model))
    return sum(parameter.numel() for parameter in built.parameters())


def training(
    setting: Setting, model: dict[str, Any] | None, head: Path, run: Path, seed: int, steps: int
) -> TrainConfig:
    """Returns the training configuration of a run; only model, window and seed differ."""
    rows = STEP_TOKENS // setting.window
    stream = head.stat().st_size // STEP_TOKENS  # windows per row in one pass over the text
    values = {
        "output_dir": str(run),
        **({} if model is None else {"model": model}),
        "task": {"kind": "text", "files": [str(head)], "max_segments": stream - 1},
        "initial_state": {"kind": "carry"},
        "seed": seed,
        "length": {"max": setting.window},
        "per_device_train_batch_size": rows,
        "max_steps": steps,
        "learning_rate": 2e-3,
        "warmup_steps": steps // 10,
        "save_steps": max(1, steps // 2),  # the middle of the training, and its end
        "save_total_limit": 2,
        "logging_steps": 50,
    }
    return build_config(TrainConfig, values)


def loss_of(model: LanguageModel, run: Path, tail: Path, quiet: bool) -> float:
    """Returns nats per character on the tail, in windows that start from the zero state."""
    documents = read_documents([tail], ByteTokenizer(), model)
    rows = measure.evaluate(
        model,
        documents,
        length=WINDOW_TOKENS,
        output=run.parent / f"{run.name}.jsonl",
        batch_size=16,
        quiet=quiet,
    )
    return measure.summarise(rows)[0].nats.mean


def gradients(chosen: list[Setting], output: Path, tail: Path, quiet: bool) -> GradientRecord:
    """Diagnoses the gradients of the first seed's models on the tail, and writes their report."""
    subjects = [
        Subject(s.name, load_recurrent(output / s.name / "seed0")) for s in chosen if s.kind != MLP
    ]
    task = TASKS.build({"kind": "text", "files": [str(tail)]})
    folder = output / "gradients"
    found = diagnose(
        subjects, task, Settings(rows=16), output=folder, described="text (the tail)", quiet=quiet
    )
    write_report(found, folder)
    return found


if __name__ == "__main__":
    run_script(main, __doc__)
