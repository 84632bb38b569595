"""Test whether longer training windows help a vanilla RNN as a character language model.

    python scripts/study_char_lm.py data/tinyshakespeare.txt

A vanilla RNN is trained on the head of a text by truncated back-propagation through windows of 16,
32 and 64 characters, also from orthogonal weights; a GRU, an LSTM and a Mamba-2 through 64. All
carry their state from window to window. `mlp-8`, a perceptron that sees the last 8 characters, is
the baseline without recurrence. All have about the same number of parameters, the same steps and
the same characters per step.
Perplexity is measured on the held-out tail; `longrnn diagnose gradients` of the runs shows why.
Finished runs are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import studies
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn import RecurrentConfig, RecurrentLM, load
from longrnn.errors import UserError
from longrnn.files import write_atomic

# Cell, window, and how its weights begin.
SETTINGS = ("rnn-16", "rnn-32", "rnn-64", "gru-64", "lstm-64", "mamba2-64", "mlp-8")
SETTINGS += ("rnn-16-orthogonal", "rnn-32-orthogonal", "rnn-64-orthogonal")
STEP_TOKENS, WINDOW, RATE = 2048, 1024, 2e-3
# A benefit of longer windows below this many nats (2 % of perplexity) is none.
BENEFIT = 0.02
CONTEXT, EMBEDDING = 8, 32


def main() -> None:
    parser = studies.options(__doc__, "runs/char-lm")
    parser.add_argument("text", type=Path)
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=256, help="of the RNN; sets the parameters")
    args = parser.parse_args()
    head, tail = split(args.text, args.output)
    held_out = studies.windows([tail], "bytes", WINDOW, (tail.stat().st_size - 1) // WINDOW)
    task, wanted = studies.text_task([head]), parameters(model_of("rnn", args.width))
    sizes, found = {}, {}
    for seed in range(args.seeds):  # outermost, so that an interrupted study has whole comparisons
        for setting in args.setting:
            kind, _, how = setting.partition("-")
            window, _, init = how.partition("-")
            if kind == "mlp":
                width = fitting(wanted, lambda d: size(Perceptron(d)))
                sizes[setting] = size(Perceptron(width))
                nats = perceptron_loss(head, held_out, width, seed, args.steps)
            else:
                width = fitting(wanted, lambda d, kind=kind: parameters(model_of(kind, d)))
                config = {"model": model_of(kind, width), "task": task}
                config["model"]["mixer"]["init"] = init or "default"
                sizes[setting] = parameters(config["model"])
                settings = run_settings(int(window), seed, args.steps)
                folder = studies.train(config, args.output / f"{setting}-seed{seed}", settings)
                nats = float(studies.losses(load(folder), held_out).mean())
            found.setdefault(setting, []).append(nats)
    control = "rnn-64" if "rnn-64" in found else args.setting[0]
    rows = [
        [setting, f"{sizes[setting]:,}", f"{math.exp(nats.mean):.2f}", nats, less, verdict]
        for setting, nats, less, verdict in studies.compared(found, control)
    ]
    titles = ["setting", "parameters", "perplexity", "nats per character"]
    titles += [f"minus {control}", "verdict"]
    studies.record(
        args.output,
        "Character language models at equal size and steps",
        studies.table(titles, rows),
        f"**Verdict.** {benefit_of(found)}",
    )


def benefit_of(found: dict[str, list[float]]) -> str:
    """Returns whether windows of 64 characters help the RNN, compared with 16."""
    if not {"rnn-16", "rnn-64"} <= found.keys():
        return "None: it needs rnn-16 and rnn-64."
    benefit = studies.differences(found["rnn-16"], found["rnn-64"])
    said = "inconclusive"
    if benefit.high < BENEFIT:
        said = "confirmed at this size: longer windows do not help"
    if benefit.low > BENEFIT:
        said = "not seen at this size: longer windows help"
    return f"Windows of 64 lower the loss of the RNN by {studies.shown(benefit)} nats, {said}."


def split(text: Path, folder: Path) -> tuple[Path, Path]:
    """Writes the first nine tenths of a text and the rest, and returns both files."""
    studies.text_task([text])
    whole = text.read_text(encoding="utf-8")
    cut = whole.find("\n", int(0.9 * len(whole))) + 1
    parts = {"head.txt": whole[:cut], "tail.txt": whole[cut:]}
    if cut == 0 or len(parts["tail.txt"].encode()) <= WINDOW:
        raise UserError(f"the last tenth of {text} is too short: give a longer text")
    for name, part in parts.items():
        write_atomic(folder / name, part)
    return folder / "head.txt", folder / "tail.txt"


def run_settings(window: int, seed: int, steps: int) -> dict[str, Any]:
    return {
        "initial_state": {"kind": "carry"},
        "length.max": window,
        "per_device_train_batch_size": STEP_TOKENS // window,
        "max_steps": steps,
        "learning_rate": RATE,
        "warmup_steps": steps // 10,
        "seed": seed,
    }


def model_of(kind: str, width: int) -> dict[str, Any]:
    """Returns a model of an embedding, one cell and a head."""
    mixer: dict[str, Any] = {"kind": kind}
    if kind == "mamba2":
        mixer |= {"d_state": 64, "head_dim": 16}
        width = 8 * max(1, width // 8)
    common = {"vocab_size": 256, "n_layers": 1, "block": "plain", "tie_embeddings": False}
    return {**common, "d_model": width, "mixer": mixer}


def parameters(model: dict[str, Any]) -> int:
    with torch.device("meta"):
        return size(RecurrentLM(RecurrentConfig(**model)))


def size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def fitting(wanted: int, count: Callable[[int], int]) -> int:
    """Returns the width whose number of parameters is nearest to `wanted`."""
    return min(range(8, 1025, 2), key=lambda width: abs(count(width) - wanted))


class Perceptron(nn.Module):
    """tanh(LayerNorm(W x)) and a head, x the embeddings of the last CONTEXT characters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, EMBEDDING)
        self.hidden = nn.Linear(CONTEXT * EMBEDDING, width, bias=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = F.pad(tokens, (CONTEXT - 1, 0), value=256).unfold(1, CONTEXT, 1)
        return self.head(torch.tanh(self.norm(self.hidden(self.embedding(seen).flatten(2)))))

    def loss(self, rows: Tensor) -> Tensor:
        return F.cross_entropy(self(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def perceptron_loss(head: Path, held_out: Tensor, width: int, seed: int, steps: int) -> float:
    """Trains the baseline with as many characters per step, and returns its loss in nats."""
    torch.manual_seed(seed)
    model, rows, first = Perceptron(width), STEP_TOKENS // 256, 10**6 * seed
    studies.fit(
        model,
        lambda step: model.loss(studies.stretches([head], rows, 257, first + step)),
        studies.cosine(RATE, steps),
    )
    with torch.no_grad():
        return float(model.loss(held_out))


if __name__ == "__main__":
    studies.run(main)
