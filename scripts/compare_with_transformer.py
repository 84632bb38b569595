"""Compare a transformer, a Mamba-2 and an LSTM of equal size on longer texts than in training.

    python scripts/compare_with_transformer.py recall
    python scripts/compare_with_transformer.py passkey --reach 16
    python scripts/compare_with_transformer.py books --train data/war_and_peace.txt \\
        --text data/moby_dick.txt

All three are trained alike (AdamW, warm-up, cosine, clipping at 1) on the same rows of one length:
pairs of keys and values to recall, passkeys, or books. Every architecture has a grid of learning
rates; the one with the lowest validation loss is repeated with further seeds. These models are then
measured at multiples of the training length. The transformer (Llama, rotary positions) has no limit
on its length here; `longrnn compare` has costs and intervals of two checkpoints.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import studies
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn import TASKS, RecurrentConfig, RecurrentLM
from longrnn.errors import UserError
from longrnn.files import write_atomic

# Widths with about the same number of parameters, with two layers: Llama, Mamba-2, LSTM.
SIZES = {"250k": (96, 128, 116), "120k": (64, 84, 80), "tiny": (16, 16, 16)}
NAMES = ("transformer", "mamba2", "lstm")
REFERENCE = "transformer"
LENGTHS = {"recall": 16, "passkey": 256, "books": 256}
VOCABULARY = {"recall": 64, "passkey": 256, "books": 256}
VALIDATION = 64


def main() -> None:
    parser = studies.options(__doc__, "runs/compare-with-transformer")
    parser.add_argument("task", choices=LENGTHS)
    parser.add_argument("--train", type=Path, nargs="+", help="books to train on")
    parser.add_argument("--text", type=Path, nargs="+", help="held-out books")
    parser.add_argument("--length", type=int, help="of a row (default: 256; recall: 16)")
    parser.add_argument("--reach", type=int, default=4, help="longest text in training lengths")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--step-tokens", type=int, default=4096)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--seeds", type=int, default=3, help="at the best learning rate")
    parser.add_argument("--size", choices=SIZES, default="250k")
    parser.add_argument("--n", type=int, default=64, help="rows per length")
    args = parser.parse_args()
    args.length = args.length or LENGTHS[args.task]
    args.output /= args.task
    if args.task == "books" and not (args.train and args.text):
        raise UserError("books need --train and --text: name text files")
    args.lengths = [args.length * 2**k for k in range(20) if 2**k <= args.reach]
    sample(args, 1, args.lengths[-1], 0, held_out=True)  # refuses books that are too short
    tried, chosen, parameters = [], {}, {}
    for name in NAMES:
        trials = {rate: trial(args, name, rate, 0) for rate in args.rates}
        best = min(trials, key=lambda rate, of=trials: of[rate]["validation"])
        for rate, result in trials.items():
            mark = "best" if rate == best else ""
            tried.append([name, f"{rate:g}", f"{result['validation']:.3f}", mark])
        more = [trial(args, name, best, seed) for seed in range(1, args.seeds)]
        chosen[name] = [result["scores"] for result in (trials[best], *more)]
        parameters[name] = trials[best]["parameters"]
    rows = []
    for length in chosen[REFERENCE][0]:
        scores = {name: [by_length[length] for by_length in chosen[name]] for name in NAMES}
        rows += [[length, *row] for row in studies.compared(scores, REFERENCE)]
    verdicts = [
        f"{name} at {length} {verdict}"
        for length, name, *_, verdict in rows
        if name != REFERENCE and int(length) > args.length
    ]
    what = "loss in nats per byte" if args.task == "books" else "share of answers that are right"
    sizes = ", ".join(f"{name} {count:,}" for name, count in parameters.items())
    studies.record(
        args.output,
        f"A transformer, a Mamba-2 and an LSTM on {args.task}, rows of {args.length}",
        studies.table(["model", "learning rate", "validation loss", ""], tried),
        studies.table(["length", "model", what, f"minus {REFERENCE}", "verdict"], rows),
        f"Parameters: {sizes}. Intervals are over {args.seeds} seeds; differences are paired.",
        f"**Verdict.** Beyond the training length, against the {REFERENCE}: {'; '.join(verdicts)}.",
    )


def build(name: str, size: str, vocabulary: int) -> Any:
    """Returns one of the models, with random weights."""
    width = SIZES[size][NAMES.index(name)]
    if name == "transformer":
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=width,
                intermediate_size=11 * width // 4,
                num_hidden_layers=2,
                num_attention_heads=4,
                tie_word_embeddings=True,
                use_cache=False,
            )
        )
    mixer: dict[str, Any] = {"kind": name}
    if name == "mamba2":
        mixer |= {"d_state": 32, "head_dim": width // 2}
    return RecurrentLM(RecurrentConfig(vocabulary, width, 2, mixer))


def sample(
    args: Namespace, rows: int, length: int, seed: int, held_out: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns tokens and targets, `(rows, length)`; `held_out` decides which books are read."""
    if args.task == "books":
        files = args.text if held_out else args.train
        tokens = studies.stretches(files, rows, length + 1, seed)
        return tokens[:, :-1], tokens[:, 1:]
    more = {"vocab_size": VOCABULARY["recall"]} if args.task == "recall" else {}
    batch = TASKS.build({"kind": args.task, **more}).sample(rows, length=length, seed=seed)
    return batch.tokens, batch.targets.where(batch.answers(), studies.UNSCORED)


def loss_of(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).logits.flatten(0, 1).float(), targets.flatten())


def trial(args: Namespace, name: str, rate: float, seed: int) -> dict[str, Any]:
    """Trains and measures one model, or reads what was recorded of it."""
    record = args.output / f"{name}-{rate:g}-seed{seed}.json"
    if record.exists():
        return json.loads(record.read_text())
    torch.manual_seed(seed)
    model = build(name, args.size, VOCABULARY[args.task])
    rows, first = max(1, args.step_tokens // args.length), 10**6 * (seed + 1)
    studies.fit(
        model,
        lambda step: loss_of(model, *sample(args, rows, args.length, first + step)),
        studies.cosine(rate, args.steps),
    )
    model.eval()
    with torch.inference_mode():
        validation = float(loss_of(model, *sample(args, VALIDATION, args.length, 1)))
        scores = {}
        for length in args.lengths:
            tokens, targets = sample(args, args.n, length, 2, held_out=True)
            if args.task == "books":
                parts = zip(tokens.split(8), targets.split(8), strict=True)
                losses = [float(loss_of(model, *part)) for part in parts]
                scores[str(length)] = sum(losses) / len(losses)
            else:
                is_right = studies.right(model, tokens, targets, 8).all(1)
                scores[str(length)] = float(is_right.double().mean())
    parameters = sum(weight.numel() for weight in model.parameters())
    result = {"validation": validation, "scores": scores, "parameters": parameters}
    write_atomic(record, json.dumps(result))
    return result


if __name__ == "__main__":
    studies.run(main)
