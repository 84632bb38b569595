"""Train a LLaMA on the prompts of `passkey-tiny`, and write it with its tokenizer of bytes.

    python scripts/train_transformer.py --output runs/llama-passkey
    longrnn eval passkey 'runs/llama-passkey+attention_window(window=252, sinks=4)' --lengths 4k

From passkeys alone a model of this size learned nothing in 500 steps. So it reads repeated random
bytes first, from which it learns to copy, and passkeys then. `--positions none` leaves out the
rotary positions. `--task` takes the prompts of another model, as its train.yaml has them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import studies
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn import TASKS
from longrnn.hf.tokenizer import byte_level
from longrnn.options import validated
from longrnn.seeds import mix, seeded
from longrnn.yaml import parse_yaml

LONGEST_ANSWER = 16
COPY_ROWS, COPY_LENGTH, PASSKEY_ROWS = 32, 128, 8
COPY_RATE, PASSKEY_RATE = 2e-3, 1.5e-3


def main() -> None:
    parser = studies.options(__doc__, "runs/llama-passkey")
    parser.add_argument("--positions", choices=["rotary", "none"], default="rotary")
    parser.add_argument("--copy-steps", type=int, default=500)
    parser.add_argument("--steps", type=int, default=700, help="at most, on passkeys")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=256, help="of the longest prompts")
    parser.add_argument("--task", type=parse_yaml, default={"kind": "passkey"}, help="in YAML")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = build(args)
    warm_up = [COPY_RATE * min(1.0, (step + 1) / 100) for step in range(args.copy_steps)]
    studies.fit(
        model, lambda step: loss_of(model, *copies(args.seed, step)), warm_up, weight_decay=0
    )
    task, seen = TASKS.build(validated(dict[str, Any], args.task, "--task")), []

    def passkey_loss(step: int) -> Tensor:
        length = args.length - (0 if step % 3 == 0 else 96 - 6 * (step % 16))
        drawn = passkeys(task, step, length, PASSKEY_ROWS, args.seed)
        seen.append(drawn.tokens.numel())
        return loss_of(model, drawn.tokens, drawn.targets.clamp(min=0), drawn.weights)

    def check(count: int) -> float:
        """Returns the share of other keys whose every byte is the most probable one."""
        drawn = passkeys(task, 10**7, args.length, count, seed=1)
        return studies.recalled(model, drawn, count)

    studies.fit(model, passkey_loss, passkey_rates(check, args.steps), weight_decay=0)
    model.save_pretrained(args.output)
    byte_level().save(args.output)
    count = sum(weight.numel() for weight in model.parameters())
    copied = args.copy_steps * COPY_ROWS * COPY_LENGTH
    studies.record(
        args.output,
        f"A LLaMA on passkeys, positions: {args.positions}",
        f"{count:,} parameters; {copied:,} tokens to copy, then {sum(seen):,} of passkeys.",
        f"**Verdict.** It recalls {check(200):.3f} of 200 keys at {args.length} tokens.",
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
        "max_position_embeddings": args.length + LONGEST_ANSWER,
        **dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"]),
    }
    if args.positions == "rotary":
        return AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    # Its layers are those of a LLaMA.
    return AutoModelForCausalLM.from_config(SmolLM3Config(**sizes, no_rope_layers=[0] * 4))


def copies(seed: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens, targets and weights of rows that repeat random bytes."""
    generator = seeded(mix(seed, step, 7))
    period = int(torch.randint(8, 48, (), generator=generator))
    text = torch.randint(32, 127, (COPY_ROWS, period), generator=generator)
    text = text.repeat(1, -(-COPY_LENGTH // period) + 1)[:, : COPY_LENGTH + 1]
    weights = (torch.arange(COPY_LENGTH) >= period).float().expand(COPY_ROWS, -1)
    return text[:, :-1], text[:, 1:], weights / weights.sum(1, keepdim=True)


def passkeys(task: Any, index: int, length: int, rows: int, seed: int) -> Any:
    """Returns a batch of independent prompts."""
    return task.batch(index, range(rows), of=rows, length=length, seed=seed, carried=False)


def passkey_rates(check: Callable[[int], float], steps: int) -> Iterator[float]:
    """Yields learning rates until 97 % of other keys are recalled in three checks."""
    checks = []
    for step in range(steps):
        if step % 50 == 0:
            checks.append(check(40) >= 0.97)
        if checks[-3:] == [True] * 3:
            return
        left = (steps - step) / (0.4 * steps)
        yield PASSKEY_RATE * min(1.0, (step + 1) / 30) * min(1.0, max(0.05, left))


def loss_of(model: Any, tokens: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Returns the mean over rows of the weighted loss, all `(rows, t)`."""
    logits = model(tokens, use_cache=False).logits.flatten(0, 1)
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)
    return (losses * weights).sum() / len(tokens)


if __name__ == "__main__":
    studies.run(main)
