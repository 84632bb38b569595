"""A transformer, a Mamba-2 and an LSTM of one size and the same tokens, on ever longer texts.

    python scripts/compare_with_transformer.py --record FILE

Each is trained with the trainer of `longrnn train`, once on passkeys and once on books, in rows of
one length that start from nothing. Then `longrnn compare` measures them from that length on to 64
times as much: keys recalled, bits per byte on books that none has seen, speed, memory. The
transformer refuses what is longer than it was made for; `transformer+beyond` is the same one that
reads on. Every part is resumable, and what is finished is skipped: give the same command again.
"""

from __future__ import annotations

import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # benchmarks/ is not installed

from benchmarks.timing import cpu_model  # noqa: E402
from longrnn import load  # noqa: E402
from longrnn.comparison.compare import compare, markdown, tables  # noqa: E402
from longrnn.comparison.suites import read_suite  # noqa: E402
from longrnn.config import build_config  # noqa: E402
from longrnn.diagnostics.comparison import write_report  # noqa: E402
from longrnn.errors import UserError  # noqa: E402
from longrnn.files import write_atomic  # noqa: E402
from longrnn.hf.opened import open_checkpoint  # noqa: E402
from longrnn.programs import run_script  # noqa: E402
from longrnn.text import read_text  # noqa: E402
from longrnn.training.config import TrainConfig  # noqa: E402
from longrnn.training.trainer import Trainer  # noqa: E402
from longrnn.units import format_length, parse_length  # noqa: E402

TRAIN = ("war_and_peace", "les_miserables", "karamazov_brothers", "don_quixote")
HELD_OUT = ("moby_dick", "tom_sawyer")
# Tokens of a step, and tokens behind a text of the training length that the transformer is made for
# as well: an answer, or what `cost` generates.
STEP_TOKENS, ROOM = 4096, 32
LSTM = {"kind": "lstm"}
# About 250,000 parameters each.
MAMBA2 = {"kind": "mamba2", "d_state": 32, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "transformer": {
        "transformer": {
            "model_type": "llama",
            "vocab_size": 256,
            "hidden_size": 96,
            "intermediate_size": 264,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "tie_word_embeddings": True,
        }
    },
    "mamba2": {"model": {"vocab_size": 256, "d_model": 128, "n_layers": 2, "mixer": MAMBA2}},
    "lstm": {
        "model": {"vocab_size": 256, "d_model": 116, "n_layers": 2, "mixer": {"kind": "lstm"}}
    },
}
# The first is what the others are compared with: it reaches every length.
VARIANTS = ("transformer+beyond", "transformer", "mamba2", "lstm")


def main(
    train: Annotated[
        list[Path] | None, typer.Option(help="Books to train on.", show_default="four in data/")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Held-out books.", show_default="two in data/")
    ] = None,
    train_length: Annotated[str, typer.Option(help="Tokens of a training row.")] = "256",
    passkey_steps: Annotated[int, typer.Option(help="Training steps on passkeys.")] = 1000,
    books_steps: Annotated[int, typer.Option(help="Training steps on books.")] = 500,
    reach: Annotated[int, typer.Option(help="Longest text, in training lengths.")] = 64,
    n: Annotated[int, typer.Option("--n", help="Prompts a length and depth.")] = 8,
    windows: Annotated[int, typer.Option(help="Parts of each held-out book.")] = 4,
    output: Annotated[Path, typer.Option(help="Folder of everything.")] = Path(
        "runs/compare-with-transformer"
    ),
    record: Annotated[Path | None, typer.Option(help="Also write the tables here.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Trains, compares, and prints tables in Markdown."""
    length = parse_length(train_length)
    books = train or [Path(f"data/{book}.txt") for book in TRAIN]
    held_out = text or [Path(f"data/{book}.txt") for book in HELD_OUT]
    lengths = [length * 4**k for k in range(20) if 4**k <= reach]
    suites = {
        "passkey": [
            {"kind": "passkey", "lengths": lengths, "depths": [0.0, 0.5, 1.0], "n": n},
            {"kind": "cost", "lengths": lengths},
        ],
        "books": [
            {
                "kind": "perplexity",
                "texts": list(map(str, held_out)),
                "lengths": lengths,
                "windows": windows,
            }
        ],
    }
    tasks = {
        "passkey": ({"kind": "passkey"}, passkey_steps),
        "books": ({"kind": "text", "files": list(map(str, books))}, books_steps),
    }
    if min(passkey_steps, books_steps, reach, n, windows) < 1:
        raise UserError("passkey-steps, books-steps, reach, n and windows must be at least 1")
    for path in (*books, *held_out):
        read_text(path)  # a book that is missing is refused now
    lines = heading(length, passkey_steps, books_steps)
    for kind, (task, steps) in tasks.items():
        folder = output / kind
        write_atomic(folder / f"{kind}.yaml", yaml.safe_dump({"evaluations": suites[kind]}))
        suite = read_suite(str(folder / f"{kind}.yaml"))
        for name in MODELS:
            Trainer(run(folder / name, name, task, steps, length), resume=True, quiet=quiet).train()
        models = [open_checkpoint(f"{folder}/{variant}", name=variant) for variant in VARIANTS]
        cells = compare(models, [suite], output=folder / "compare", quiet=quiet)
        about = {one.name: f"{one.checkpoint}, trained on {kind}" for one in models}
        write_report(cells, folder / "compare", models=about, suites={kind: suite.text})
        lines += [f"\n## {kind}\n", *sizes(folder), "", *markdown(tables(cells)[0])]
    content = "\n".join(lines) + "\n"
    for path in filter(None, (output / "table.md", record)):
        write_atomic(path, content)
    typer.echo(content)


def run(folder: Path, name: str, task: dict[str, Any], steps: int, length: int) -> TrainConfig:
    """The training of one model; all but the model is equal among them."""
    shape = MODELS[name]
    if "transformer" in shape:
        positions = {"max_position_embeddings": length + ROOM}
        shape = {"transformer": shape["transformer"] | positions}
    return build_config(
        TrainConfig,
        {
            **shape,
            "output_dir": str(folder),
            "task": task,
            "length": {"max": length},
            "per_device_train_batch_size": max(1, STEP_TOKENS // length),
            "max_steps": steps,
            "learning_rate": 2e-3,
            "warmup_steps": min(100, steps // 5),
            "weight_decay": 0.1,
            "save_steps": 250,
            "logging_steps": 50,
        },
    )


def heading(length: int, passkey_steps: int, books_steps: int) -> list[str]:
    """What was run, where and when."""
    return [
        "# A transformer, a Mamba-2 and an LSTM on longer texts than they were trained on",
        "",
        f"`python {shlex.join(sys.argv)}`, {datetime.now(UTC):%Y-%m-%d}, {cpu_model()}, "
        f"{torch.get_num_threads()} thread(s), Python {platform.python_version()}, torch "
        f"{torch.__version__}.",
        "",
        f"Rows of {format_length(length)} bytes that start from nothing, {STEP_TOKENS} tokens a "
        f"step, {passkey_steps:,} steps on passkeys and {books_steps:,} on books, learning rate "
        "2e-3 with a cosine, one seed. A length is what is read then, in bytes. In brackets 95 % "
        "intervals; below a value the difference from `transformer+beyond` on the same items, "
        "paired. `transformer+beyond` is the same transformer, reading on behind the end of what "
        "it was made for. Peak memory is that of the process, libraries included (transformers' "
        "own come on top for a transformer).",
    ]


def sizes(folder: Path) -> list[str]:
    """The parameters of each model, in one line."""
    counts = []
    for name in MODELS:
        model = load(folder / name)
        counts.append(f"{name} {sum(p.numel() for p in model.parameters()):,}")
    return [f"Parameters: {', '.join(counts)}."]


if __name__ == "__main__":
    run_script(main, __doc__)
