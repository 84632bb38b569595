"""The fixed-context baseline of scripts/study_char_lm.py: a perceptron over the last characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.data import TASKS
from longrnn.files import write_atomic
from longrnn.models import LMOutput
from longrnn.models.base import fingerprint
from longrnn.models.checks import check_tokens
from longrnn.seeds import seeded
from longrnn.state import LMState
from longrnn.training.config import TrainConfig
from longrnn.training.optim import learning_rate

# Characters that a prediction sees, and width of the embedding of each.
CONTEXT, EMBEDDING = 8, 32
# Characters of a training row; a row begins with an empty context.
ROW = 256


class ContextMLP(nn.Module):
    """A `LanguageModel` that sees the last CONTEXT tokens: tanh(LayerNorm(W x)) and a head.

    x holds their embeddings, concatenated. Its state is the last CONTEXT − 1 tokens; before the
    first token they are a padding id, so that the model is exact for every split of its input.

    Args:
        vocab_size: number of token ids.
        width: units of the hidden layer.
    """

    max_length = None

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.vocab_size, self.width = vocab_size, width
        self.embedding = nn.Embedding(vocab_size + 1, EMBEDDING)
        self.hidden = nn.Linear(CONTEXT * EMBEDDING, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def init_state(self, batch_size: int) -> LMState:
        device = self.head.weight.device
        last = torch.full((batch_size, CONTEXT - 1), self.vocab_size, device=device)
        return LMState(torch.zeros(batch_size, dtype=torch.long, device=device), (last,))

    def forward(
        self, tokens: Tensor, state: LMState | None = None, *, keep: int | None = None
    ) -> LMOutput:
        """Consumes tokens; see `LanguageModel`."""
        tokens = check_tokens(tokens, self.vocab_size)
        state = self.init_state(len(tokens)) if state is None else state
        (last,) = state.layers
        seen = torch.cat([last, tokens], dim=1)
        time = tokens.shape[1]
        kept = time if keep is None else min(keep, time)
        contexts = seen.unfold(1, CONTEXT, 1)[:, time - kept :] if time else tokens[:, :0, None]
        if kept:
            x = self.hidden(self.embedding(contexts).flatten(2))
            logits = self.head(torch.tanh(self.norm(x)))
        else:
            logits = self.head.weight.new_zeros(len(tokens), 0, self.vocab_size)
        return LMOutput(logits, LMState(state.position + time, (seen[:, time:],)))

    def fingerprint(self) -> str:
        """See `LanguageModel`."""
        return fingerprint({"kind": "context_mlp", "width": self.width}, self.state_dict())


def parameters(width: int, vocab_size: int = 256) -> int:
    """Returns the number of parameters of a width."""
    with torch.device("meta"):
        return sum(one.numel() for one in ContextMLP(vocab_size, width).parameters())


# The number of parameters is linear in the width.
SLOPE = parameters(2) - parameters(1)
OFFSET = parameters(1) - SLOPE


def matched(wanted: int) -> int:
    """Returns the width with the number of parameters nearest to `wanted`."""
    return min(range(1, wanted), key=lambda width: abs(width * SLOPE + OFFSET - wanted))


def train(config: TrainConfig, width: int) -> ContextMLP:
    """Trains the model on the task of a configuration, or loads it if that is done.

    Text, seed, steps, characters per step, AdamW, schedule and clipping are those of the
    configuration; a row has ROW characters, because nothing is carried from row to row.
    """
    path = Path(config.output_dir) / f"mlp{width}-steps{config.max_steps}.safetensors"
    torch.manual_seed(config.seed)
    model = ContextMLP(256, width)
    if path.is_file():
        model.load_state_dict(load_file(path))
        return model.eval()
    options: dict[str, Any] = {"kind": "text", "files": config.task["files"]}
    task = TASKS.build(options, None)
    n_rows = config.per_device_train_batch_size * config.length.max // ROW
    betas = (config.adam_beta1, config.adam_beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, betas, weight_decay=config.weight_decay
    )
    generator = seeded(config.seed)
    for step in range(config.max_steps):
        batch = task.sample(n_rows, length=ROW, generator=generator)
        logits = model(batch.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.step()
        optimizer.zero_grad()
    write_atomic(path, save(model.state_dict()))
    return model.eval()
