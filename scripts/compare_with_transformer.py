"""Compare a transformer, a Mamba-2 and an LSTM of equal size on longer texts than in training.

    python scripts/compare_with_transformer.py recall
    python scripts/compare_with_transformer.py passkey --reach 16
    python scripts/compare_with_transformer.py books --train data/war_and_peace.txt \\
        --text data/moby_dick.txt

All three are trained by Hugging Face's Trainer (AdamW, warm-up, cosine, clipping at 1) on the same
rows of one length: pairs of keys and values to recall, passkeys, or books. Every architecture has a
grid of learning rates; the one with the lowest validation loss is repeated with further seeds.
These models are then measured at multiples of the training length. The transformer (Llama, rotary
positions) has no limit on its length here; `longrnn compare` has costs and intervals of two
checkpoints.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import studies
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn import TASKS, RecurrentConfig, RecurrentLM
from longrnn.errors import UserError

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
    runs, chosen, parameters = [], {}, {}
    for name in NAMES:
        trials = {rate: trial(args, name, rate, 0) for rate in args.rates}
        best = min(trials, key=lambda rate, of=trials: of[rate]["validation"])
        seeds = [trials[best], *(trial(args, name, best, s) for s in range(1, args.seeds))]
        chosen[name], parameters[name] = seeds, seeds[0]["parameters"]
        runs += [[name, f"{rate:g}", f"{one['validation']:.3f}", "best" if rate == best else ""]
                 for rate, one in trials.items()]  # fmt: skip
    rows, verdicts = [], []
    for length in chosen[REFERENCE][0]["scores"]:
        scores = {name: [one["scores"][length] for one in runs] for name, runs in chosen.items()}
        for name, values in scores.items():
            less = studies.differences(values, scores[REFERENCE])
            rows.append([length, name, studies.estimate(values), less, studies.verdict(less)])
            if name != REFERENCE and int(length) > args.length:
                verdicts.append(f"{name} at {length} {studies.verdict(less)}")
    what = "loss in nats per byte" if args.task == "books" else "share of answers that are right"
    sizes = ", ".join(f"{name} {count:,}" for name, count in parameters.items())
    studies.record(
        args.output,
        f"A transformer, a Mamba-2 and an LSTM on {args.task}, rows of {args.length}",
        studies.table(["model", "learning rate", "validation loss", ""], runs),
        studies.table(["length", "model", what, f"minus {REFERENCE}", "verdict"], rows),
        f"Parameters: {sizes}. Intervals are over {args.seeds} seeds; differences are paired.",
        f"**Verdict.** Beyond the training length, against the {REFERENCE}: {'; '.join(verdicts)}.",
    )


def build(name: str, size: str, vocabulary: int) -> Any:
    transformer, mamba2, lstm = SIZES[size]
    if name == "transformer":
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=transformer,
                intermediate_size=11 * transformer // 4,
                num_hidden_layers=2,
                num_attention_heads=4,
                tie_word_embeddings=True,
                use_cache=False,
            )
        )
    width = mamba2 if name == "mamba2" else lstm
    heads = {"kind": "mamba2", "d_state": 32, "head_dim": mamba2 // 2}
    return RecurrentLM(
        RecurrentConfig(vocabulary, width, 2, heads if name == "mamba2" else {"kind": "lstm"})
    )


def sample(
    args: Namespace, rows: int, length: int, seed: int, held_out: bool
) -> tuple[Tensor, Tensor]:
    """Returns tokens and targets of rows; `held_out` decides which books are read."""
    if args.task != "books":
        more = {"vocab_size": VOCABULARY["recall"]} if args.task == "recall" else {}
        batch = TASKS.build({"kind": args.task, **more}).sample(rows, length=length, seed=seed)
        return batch.tokens, batch.targets.where(batch.answers(), studies.UNSCORED)
    files = args.text if held_out else args.train
    studies.text_task(files)
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    if len(text) <= length + 1:
        raise UserError(f"the books have {len(text):,} bytes and rows {length:,}: give longer ones")
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length - 1, (rows,), generator=draw).tolist()
    tokens = torch.stack([text[k : k + length + 1].long() for k in starts])
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).logits.flatten(0, 1).float(), targets.flatten())


class Scored(nn.Module):
    """A model that returns its loss, as Hugging Face's Trainer reads it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.model, tokens, targets)}


class Steps(torch.utils.data.Dataset):
    """The batches of a run, one per step."""

    def __init__(self, args: Namespace, seed: int) -> None:
        self.args, self.seed = args, seed

    def __len__(self) -> int:
        return self.args.steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        rows = max(1, self.args.step_tokens // self.args.length)
        draw = 10**6 * (self.seed + 1) + step
        tokens, targets = sample(self.args, rows, self.args.length, draw, False)
        return {"tokens": tokens, "targets": targets}


def train(args: Namespace, model: nn.Module, rate: float, seed: int) -> None:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    settings = TrainingArguments(
        output_dir=str(args.output / "trainer"),
        max_steps=args.steps,
        per_device_train_batch_size=1,
        learning_rate=rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.steps // 20,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        seed=seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    batches = Steps(args, seed)
    trainer = Trainer(Scored(model), settings, train_dataset=batches, data_collator=lambda s: s[0])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def trial(args: Namespace, name: str, rate: float, seed: int) -> dict[str, Any]:
    """Trains and measures one model, or reads what was recorded of it."""
    kept = args.output / f"{name}-{rate:g}-seed{seed}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    torch.manual_seed(seed)
    model = build(name, args.size, VOCABULARY[args.task])
    train(args, model, rate, seed)
    model.eval()
    with torch.inference_mode():
        validation = float(loss_of(model, *sample(args, VALIDATION, args.length, 1, False)))
        scores = {}
        for length in (args.length * 2**k for k in range(20) if 2**k <= args.reach):
            tokens, targets = sample(args, args.n, length, 2, True)
            if args.task == "books":
                parts = zip(tokens.split(8), targets.split(8), strict=True)
                found = [float(loss_of(model, *part)) for part in parts]
                scores[length] = sum(found) / len(found)
            else:
                scores[length] = float(
                    studies.right(model, tokens, targets, 8).all(1).double().mean()
                )
    count = sum(one.numel() for one in model.parameters())
    result = {"validation": validation, "scores": scores, "parameters": count}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(result))
    return json.loads(kept.read_text())


if __name__ == "__main__":
    studies.run(main)
