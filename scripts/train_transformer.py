"""Train a LLaMA on the prompts of `passkey-tiny`, and write it with its tokenizer of bytes.

    python scripts/train_transformer.py --output runs/llama-passkey
    longrnn eval passkey 'runs/llama-passkey+attention_window(window=252, sinks=4)' --lengths 4k

From passkeys alone a model of this size learned nothing in 500 steps. So it reads repeated random
bytes first, from which it learns to copy, and passkeys then. `--positions none` leaves out the
rotary positions.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import studies
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from longrnn import TASKS
from longrnn.hf.tokenizer import byte_level
from longrnn.seeds import mix, seeded

LENGTH, LONGEST_ANSWER = 256, 16
COPY_ROWS, COPY_LENGTH, PASSKEY_ROWS = 32, 128, 8
COPY_RATE, PASSKEY_RATE = 2e-3, 1.5e-3


def main() -> None:
    parser = studies.options(__doc__, "runs/llama-passkey")
    parser.add_argument("--positions", choices=["rotary", "none"], default="rotary")
    parser.add_argument("--copy-steps", type=int, default=500)
    parser.add_argument("--steps", type=int, default=700, help="at most, on passkeys")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = build(args)
    warm = partial(warmed_up, 100)
    fit(model, args.copy_steps, COPY_RATE, warm, lambda step: copies(args.seed, step))
    seen = train_on_passkeys(model, args)
    model.save_pretrained(args.output)
    byte_level().save(args.output)
    count = sum(weight.numel() for weight in model.parameters())
    copied = args.copy_steps * COPY_ROWS * COPY_LENGTH
    studies.record(
        args.output,
        f"A LLaMA on passkeys, positions: {args.positions}",
        f"{count:,} parameters; {copied:,} tokens to copy, then {seen:,} of passkeys.",
        f"**Verdict.** It recalls {share_recalled(model, 200):.3f} of 200 keys at {LENGTH} tokens.",
    )


def build(args: Namespace) -> Any:
    """Returns a LLaMA with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig, SmolLM3Config

    sizes = {
        "vocab_size": 256,
        "hidden_size": args.width,
        "intermediate_size": 7 * args.width // 2,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": LENGTH + LONGEST_ANSWER,
        **dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"]),
    }
    if args.positions == "rotary":
        return AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    # Its layers are those of a LLaMA.
    return AutoModelForCausalLM.from_config(SmolLM3Config(**sizes, no_rope_layers=[0] * 4))


def warmed_up(steps: int, step: int) -> float:
    """Returns the share of the learning rate at a step of the warm-up, or after it."""
    return min(1.0, (step + 1) / steps)


def copies(seed: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens, targets and weights of rows that repeat random bytes."""
    generator = seeded(mix(seed, step, 7))
    period = int(torch.randint(8, 48, (), generator=generator))
    text = torch.randint(32, 127, (COPY_ROWS, period), generator=generator)
    text = text.repeat(1, -(-COPY_LENGTH // period) + 1)[:, : COPY_LENGTH + 1]
    weights = (torch.arange(COPY_LENGTH) >= period).float().expand(COPY_ROWS, -1)
    return text[:, :-1], text[:, 1:], weights / weights.sum(1, keepdim=True)


def train_on_passkeys(model: Any, args: Namespace) -> int:
    """Trains until 97 % of held-out keys are recalled in three checks, and returns the tokens."""
    task, seen, checks = TASKS.build({"kind": "passkey"}), 0, []

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal seen
        if step % 50 == 0:
            checks.append(share_recalled(model, 40) >= 0.97)
        length = LENGTH if step % 3 == 0 else 160 + 6 * (step % 16)
        rows = range(PASSKEY_ROWS)
        drawn = task.batch(
            step, rows, of=PASSKEY_ROWS, length=length, seed=args.seed, carried=False
        )
        seen += drawn.tokens.numel()
        assert drawn.weights is not None
        return drawn.tokens, drawn.targets.clamp(min=0), drawn.weights

    def rate(step: int) -> float:
        left = (args.steps - step) / (0.4 * args.steps)
        return warmed_up(30, step) * min(1.0, max(0.05, left))

    fit(model, args.steps, PASSKEY_RATE, rate, batch, lambda: checks[-3:] == [True] * 3)
    return seen


def fit(
    model: Any,
    steps: int,
    highest: float,
    rate: Any,
    batch: Any,
    is_done: Any = lambda: False,
) -> None:
    """Trains with AdamW, from tokens, targets and weights of each step.

    Args:
        model: in training.
        steps: at most.
        highest: the learning rate that `rate` is a share of.
        rate: by step.
        batch: returns the rows of a step.
        is_done: whether training ends.
    """
    optimizer = torch.optim.AdamW(model.parameters(), highest, betas=(0.9, 0.95), weight_decay=0)
    schedule = LambdaLR(optimizer, rate)
    for step in range(steps):
        tokens, targets, weights = batch(step)
        if is_done():
            return
        logits = model(tokens, use_cache=False).logits.flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)
        ((losses * weights).sum() / len(tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@torch.no_grad()
def share_recalled(model: Any, count: int) -> float:
    """The share of held-out keys whose every byte is the most probable one."""
    task = TASKS.build({"kind": "passkey"})
    drawn = task.batch(10**7, range(count), of=count, length=LENGTH, seed=1, carried=False)
    found = model(drawn.tokens).logits.argmax(-1)
    assert drawn.answer is not None
    return float(((found == drawn.targets) | ~drawn.answer).all(1).float().mean())


if __name__ == "__main__":
    studies.run(main)
