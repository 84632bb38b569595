"""Compare a transformer, a Mamba-2 and an LSTM of equal size and training on longer texts.

    python scripts/compare_with_transformer.py --record FILE

Each is trained with the trainer of `longrnn train`, once on passkeys and once on books, in rows of
one length that start from the zero state. Then `longrnn compare` measures them at that length and
at up to 64 times that length: keys recalled, bits per byte on held-out books, speed, memory. The
transformer refuses texts longer than its maximum length; `transformer+beyond` is the same model
without that limit. The same command resumes an interrupted study and skips what is finished.
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
# Tokens per training step.
STEP_TOKENS = 4096
# Positions of the transformer beyond the training length: for an answer, or what `cost` generates.
EXTRA_POSITIONS = 32
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
# The others are compared with the first one, which can be evaluated at every length.
VARIANTS = ("transformer+beyond", "transformer", "mamba2", "lstm")


def main(
    train: Annotated[
        list[Path] | None, typer.Option(help="Books to train on.", show_default="four in data/")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Held-out books.", show_default="two in data/")
    ] = None,
    train_length: Annotated[str, typer.Option(help="Length of a training row in tokens.")] = "256",
    passkey_steps: Annotated[int, typer.Option(help="Training steps on passkeys.")] = 1000,
    books_steps: Annotated[int, typer.Option(help="Training steps on books.")] = 500,
    reach: Annotated[
        int, typer.Option(help="Longest text, as a multiple of the training length.")
    ] = 64,
    n: Annotated[int, typer.Option("--n", help="Prompts per length and depth.")] = 8,
    windows: Annotated[int, typer.Option(help="Windows of each held-out book.")] = 4,
    output: Annotated[Path, typer.Option(help="Folder for runs and results.")] = Path(
        "runs/compare-with-transformer"
    ),
    record: Annotated[Path | None, typer.Option(help="Also write the tables to this file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Trains and compares the models, and prints tables in Markdown."""
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
        raise UserError(
            "passkey-steps, books-steps, reach, n and windows must be at least 1: give larger ones"
        )
    for path in (*books, *held_out):
        read_text(path)  # refuses a missing book before the training begins
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
    """Returns the training configuration of one model; only the model differs between them."""
    shape = MODELS[name]
    if "transformer" in shape:
        positions = {"max_position_embeddings": length + EXTRA_POSITIONS}
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
    """Returns the title and the paragraph on commands, hardware and settings."""
    return [
        "# A transformer, a Mamba-2 and an LSTM on longer texts than they were trained on",
        "",
        f"`python {shlex.join(sys.argv)}`, {datetime.now(UTC):%Y-%m-%d}, {cpu_model()}, "
        f"{torch.get_num_threads()} thread(s), Python {platform.python_version()}, torch "
        f"{torch.__version__}.",
        "",
        f"Rows of {format_length(length)} bytes that start from the zero state, {STEP_TOKENS} "
        f"tokens per step, {passkey_steps:,} steps on passkeys and {books_steps:,} on books, "
        "learning rate 2e-3 with a cosine schedule, one seed. Lengths are those of the "
        "evaluation, in bytes. In brackets: 95 % intervals; below a value: its paired difference "
        "from `transformer+beyond` on the same items. `transformer+beyond` is the same transformer "
        "without its limit on the length. Peak memory is that of the process, including "
        "libraries (a transformer also loads those of transformers).",
    ]


def sizes(folder: Path) -> list[str]:
    """Returns one line with the number of parameters of each model."""
    counts = []
    for name in MODELS:
        model = load(folder / name)
        counts.append(f"{name} {sum(p.numel() for p in model.parameters()):,}")
    return [f"Parameters: {', '.join(counts)}."]


if __name__ == "__main__":
    run_script(main, __doc__)
